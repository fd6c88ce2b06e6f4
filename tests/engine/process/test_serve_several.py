"""`realizar serve` with several models: engines of their own, in a bounded memory, of which one may be killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copyfile

import httpx
import pytest

from engine.process.served import SHORT, serving
from realizar.config import EngineConfig
from realizar.engine.process.planning import answer_of
from waits import HANG_S, child_pids, is_alive, wait_until

OPTIONS = ("--context-length", "512", "--kv-cache-bytes", "4M", "--max-running", "4")
CONFIG = EngineConfig(context_length=512, kv_cache_bytes=4_000_000, max_running=4)


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of the same weights, one whose name is no text, and a file that is none."""
    folder = tmp_path_factory.mktemp("several")
    for name in ("one", "two", "three"):
        copyfile(tiny, folder / f"{name}.gguf")
    copyfile(tiny, folder / os.fsdecode(b"caf\xe9.gguf"))
    (folder / "torn.gguf").write_bytes(tiny.read_bytes()[:300])
    return folder


def ask(url: str, model: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**SHORT, "model": model}, timeout=HANG_S)


def states(url: str) -> dict[str, str]:
    listed = httpx.get(f"{url}/v1/models", timeout=HANG_S).json()["data"]
    return {each["id"]: each["state"] for each in listed}


def test_models_take_turns_die_alone_and_are_loaded_again(folder: Path) -> None:
    load = answer_of(str(folder / "one.gguf"), CONFIG, 1 << 30).checked()
    memory = str(load.num_bytes * 5 // 2)  # two fit
    with serving("--model-folder", folder, "--memory", memory, *OPTIONS) as server:
        url = server.wait_ready()
        server.wait_line("warning: a model is left out: .*not UTF-8 text")
        server.wait_line("warning: torn is left out: .*torn.gguf")
        assert states(url) == {"one": "known", "three": "known", "two": "known"}
        assert child_pids(server.process.pid) == []
        with ThreadPoolExecutor(9) as threads:
            answers = list(threads.map(lambda name: ask(url, name), ("one", "two", "three") * 3))
        assert [answer.status_code for answer in answers] == [200] * 9
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        assert sorted(states(url).values()) == ["known", "ready", "ready"]
        first, second = (name for name, state in states(url).items() if state == "ready")

        os.kill(child_pids(server.process.pid)[0], signal.SIGKILL)
        wait_until(lambda: sorted(states(url).values()) == ["failed", "known", "ready"])
        left = next(name for name in (first, second) if states(url)[name] == "ready")
        died = second if left == first else first
        assert ask(url, left).status_code == 200
        assert ask(url, died).status_code == 200  # it is loaded again
        server.wait_line(f"{died}: its engine has ended: the engine process was killed by SIGKILL")

        idle = next(name for name, state in states(url).items() if state == "known")
        whole = (folder / f"{idle}.gguf").read_bytes()
        (folder / f"{idle}.gguf").write_bytes(whole[:300])
        refused = ask(url, idle)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_not_loaded"
        assert f"{idle}.gguf has 300 bytes instead of {len(whole)}" in refused.json()["error"]["message"]
        (folder / f"{idle}.gguf").write_bytes(whole)
        assert ask(url, left).status_code == 200
        wait_until(lambda: ask(url, idle).status_code == 200)

        pids = child_pids(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert not any(is_alive(pid) for pid in pids)


def test_a_server_that_ends_while_it_loads_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    with (
        serving("--model-folder", folder, "--memory", "2G", *OPTIONS, hold=tmp_path) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        url = server.wait_ready()
        with server.held_loading():
            asked = threads.submit(ask, url, "one")
            wait_until(lambda: len(child_pids(server.process.pid)) == 1)
            pids = child_pids(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            answer = asked.result(HANG_S)
            assert answer.status_code == 503
            assert "shutting down" in answer.json()["error"]["message"]
            assert server.wait_exit() == 0
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "{one}", "--model", "{torn}"), r"torn\.gguf: "),
        (("--model", "{one}", "--model", "{one}"), "two models have the name one"),
        (("--model", "{one}", "--model", "{two}", "--memory", "9M"), "one: the model does not fit into 9.0 MB"),
        (("--model", "{one}", "--model", "{two}", "--api-processes", "2"), "--api-processes above 1 serve a single"),
        (("--model", "{one}", "--model", "{two}", "--alias", "x"), "--served-model-name is for a single model"),
        (
            ("--model", "{one}", "--model", "{two}", "--keep-alive", "inf"),
            "--keep-alive must be between 0 and 10+, not",
        ),
        (("--model", "{one}", "--model", "{two}", "--mmproj", "x"), "--mmproj names an encoder of a single model's"),
        (("--model", "{one}", "--memory", "1G"), "--memory is for several models"),
        (("--model", "{one}", "--sleep-memory", "1G"), "--sleep-memory is for several models"),
        (("--model", "{one}", "--model", "{two}", "--sleep-memory", "1G"), "--sleep-memory is for models on a GPU"),
        (("--model-folder", "/nowhere"), "/nowhere can't be read"),
        (("--model-folder", "{empty}"), "has no model"),
        ((), "serve needs a model"),
    ],
)
def test_command_lines_that_are_refused(
    folder: Path, tmp_path: Path, refusal: Callable[..., str], words: tuple[str, ...], message: str
) -> None:
    names = {name: folder / f"{name}.gguf" for name in ("one", "two", "torn")}
    said = refusal(*(word.format(**names, empty=tmp_path) for word in words)).splitlines()
    assert re.search(message, said[-1]), said
