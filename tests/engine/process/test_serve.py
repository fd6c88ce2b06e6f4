"""`realizar serve` as its users meet it: processes, signals, clients that leave, engines that die."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine.process import held_serve
from engine.process.served import (
    SHORT,
    Served,
    Stream,
    bare_request,
    figure,
    is_ready,
    serving,
    short_text,
)
from realizar.backends.devices import ChosenDevice
from realizar.cli.commands.serve import describe
from realizar.config import EngineConfig
from realizar.engine.process.loop import EngineLoop
from realizar.engine.process.messages import Event, Ready, Shutdown
from resolving import new_core
from scripted_backend import ScriptedBackend, make_spec
from waits import HANG_S, is_alive, process, wait_until


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as it was: 4 run, 4 wait."""
    hold = tmp_path_factory.mktemp("hold")
    with serving(tiny, "--max-running", "4", "--max-queued", "4", hold=hold) as served:
        served.wait_ready()
        yield served


def test_it_says_what_it_chose(server: Served) -> None:
    server.wait_ready()
    said = "".join(server.lines)
    assert "context: 2048 tokens a request\n" in said
    assert "answers: 4 at once, 4 queued\n" in said
    assert re.search(r"^KV cache: [\d.]+ [MG]B of f16 for \d+ tokens$", said, re.MULTILINE)
    assert re.search(r"^threads: \d+$", said, re.MULTILINE)


def test_a_gpu_is_named_in_place_of_threads() -> None:
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig(), device=ChosenDevice("cuda", 1, "NVIDIA X"))
    events: list[Event] = []
    loop = EngineLoop(events.append)
    loop.post(Shutdown())
    loop.run(lambda: core)
    (ready,) = events
    assert isinstance(ready, Ready)
    assert describe(ready.info, EngineConfig(), 256, 8)[-1] == "device: cuda:1, NVIDIA X"


def test_models_answer_while_the_weights_load(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "loading").touch()
    with serving(tiny, hold=tmp_path) as served, served.held_loading():
        url = served.wait_line(r"being loaded; (\S+) answers already").group(1)
        models = httpx.get(f"{url}/v1/models", timeout=HANG_S).json()
        assert models["data"][0]["id"] == "tiny"
        assert [httpx.get(f"{url}/{name}", timeout=HANG_S).status_code for name in ("health", "ready")] == [200, 503]
        (tmp_path / "loading").unlink()
        assert served.wait_ready() == url
        assert is_ready(url)


def test_a_killed_engine_fails_all_and_is_replaced(server: Served) -> None:
    """All streams get the error at once, before the next engine begins to load."""
    url = server.wait_ready()
    before = short_text(url)
    with server.held_loading():
        with server.held_steps():
            streams = [Stream(url) for _ in range(4)]
            for stream in streams:
                stream.wait_begun()
            with ThreadPoolExecutor(2) as pool:
                waiting: list[Future[httpx.Response]] = [
                    pool.submit(httpx.post, f"{url}/v1/completions", json=SHORT, timeout=HANG_S) for _ in range(2)
                ]
                pid = server.engine_pid
                os.kill(pid, signal.SIGKILL)
                for stream in streams:
                    stream.join()
                assert {future.result().status_code for future in waiting} <= {500, 503}
        for stream in streams:
            assert stream.error is not None
            assert "engine stopped" in stream.error
            assert stream.finish is None
        assert httpx.get(f"{url}/health", timeout=HANG_S).status_code == 200
        assert not is_ready(url)
    wait_until(lambda: is_ready(url))
    assert server.engine_pid != pid
    assert short_text(url) == before
    text = httpx.get(f"{url}/metrics", timeout=HANG_S).text
    restarts = re.search(r"^realizar:engine_restarts_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert restarts is not None
    assert float(restarts.group(1)) == 1


def test_a_model_file_that_is_cut_short_while_it_is_served(tiny: Path, tmp_path: Path) -> None:
    """A step that reads what is gone ends the engine (SIGBUS); the API says why, until the file is whole."""
    model, good = tmp_path / "tiny.gguf", tiny.read_bytes()
    model.write_bytes(good)
    with serving(model) as served:
        url = served.wait_ready()
        before = short_text(url)
        with model.open("r+b") as file:
            file.truncate(4096)
        died = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=HANG_S)
        assert (died.status_code, died.json()["error"]["code"]) == (503, "engine_died")
        wait_until(lambda: "reason" in httpx.get(f"{url}/ready", timeout=HANG_S).json())
        reason = f"tiny.gguf has 4096 bytes instead of {len(good)}"
        response = httpx.get(f"{url}/ready", timeout=HANG_S)
        assert (response.status_code, response.json()) == (503, {"status": "starting", "reason": reason})
        refused = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=HANG_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert reason in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=HANG_S).status_code == 200
        model.write_bytes(good)
        wait_until(lambda: is_ready(url))
        assert short_text(url) == before


def test_a_disconnect_mid_stream_frees_the_blocks(server: Served) -> None:
    url = server.wait_ready()
    with server.held_steps():
        with bare_request(url, first_delta=True):
            wait_until(lambda: figure(url, "num_requests_running") == 1)
        wait_until(lambda: figure(url, "num_requests_running") == 0)
    wait_until(lambda: figure(url, "kv_cache_usage_perc") == 0)


def test_a_disconnect_while_waiting_frees_the_place(server: Served) -> None:
    url = server.wait_ready()
    with server.held_steps():
        others = [Stream(url) for _ in range(4)]
        for other in others:
            other.wait_begun()
        with bare_request(url, first_delta=False):
            wait_until(lambda: figure(url, "num_requests_waiting") == 1)
        wait_until(lambda: figure(url, "num_requests_waiting") == 0)
        assert all(other.is_open for other in others)
    for other in others:
        other.join()
        assert other.finish == "length"
    wait_until(lambda: figure(url, "kv_cache_usage_perc") == 0)


def test_a_full_queue_is_refused_with_a_time(server: Served) -> None:
    url = server.wait_ready()
    with server.held_steps():
        streams = [Stream(url) for _ in range(8)]
        wait_until(lambda: figure(url, "num_requests_running") + figure(url, "num_requests_waiting") == 8)
        refused = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=HANG_S)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    for stream in streams:
        stream.join()
    assert [stream.finish for stream in streams] == ["length"] * 8
    assert short_text(url)


def test_sigterm_ends_all_that_was_accepted(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, "--max-running", "2", hold=tmp_path) as served:
        url = served.wait_ready()
        with served.held_steps():
            streams = [Stream(url) for _ in range(4)]
            wait_until(lambda: figure(url, "num_requests_running") + figure(url, "num_requests_waiting") == 4)
            engine_pid = served.engine_pid
            served.process.send_signal(signal.SIGTERM)
            served.wait_line("the server shuts down when the open requests have ended")
            late = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=HANG_S)
            assert (late.status_code, "retry-after" in late.headers) == (503, True)
        for stream in streams:
            stream.join()
        assert [(stream.finish, stream.error) for stream in streams] == [("length", None)] * 4
        assert served.wait_exit() == 0
        assert not is_alive(engine_pid)


def test_whoever_reads_its_log_may_leave(tiny: Path, tmp_path: Path) -> None:
    """A signal still lets open answers end."""
    command = [sys.executable, held_serve.__file__, str(tmp_path), "serve", str(tiny), "--port", "0"]
    with process(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        url = next(line for line in server.stderr if line.startswith("ready: ")).split()[1]
        server.stderr.close()
        hold = held_serve.Hold(tmp_path)
        hold.hold_steps(0.4, 2)
        stream = Stream(url)
        stream.wait_begun()
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(url))
        hold.steps.unlink()
        stream.join()
        assert (stream.finish, stream.error) == ("length", None)
        assert server.wait(HANG_S) == 0


def test_a_second_signal_stops_at_once(tiny: Path, tmp_path: Path) -> None:
    """The streams would last for longer than the test waits for the server's end."""
    with serving(tiny, "--max-running", "2", hold=tmp_path) as served:
        url = served.wait_ready()
        with served.held_steps():
            streams = [Stream(url) for _ in range(8)]
            wait_until(lambda: any(stream.is_open for stream in streams))
            engine_pid = served.engine_pid
            served.process.send_signal(signal.SIGTERM)
            served.wait_line("the server shuts down")
            served.process.send_signal(signal.SIGINT)
            assert served.wait_exit() == 128 + signal.SIGINT
        for stream in streams:
            stream.join()
        assert all(stream.finish is None for stream in streams)
        assert not is_alive(engine_pid)
        assert "Traceback" not in "".join(served.lines)


def test_no_engine_is_left_when_the_server_is_killed(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, hold=tmp_path) as served:
        url = served.wait_ready()
        with served.held_steps():
            stream = Stream(url)
            stream.wait_begun()
            engine_pid = served.engine_pid
            assert is_alive(engine_pid)
            served.process.kill()
            wait_until(lambda: not is_alive(engine_pid))
            stream.join()


def test_a_broken_model_is_one_clear_error(tiny: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:-100_000])
    (error,) = refusal(broken).splitlines()
    assert error.startswith("realizar: ")
    assert str(broken) in error


def test_what_only_the_engine_finds_is_one_clear_error(tiny: Path) -> None:
    """In a process of its own, whose output is all that there is."""
    with serving(tiny, "--kv-cache-bytes", "1K") as served:
        assert served.wait_exit() == 1
        assert "Traceback" not in "".join(served.lines)
        (error,) = (line for line in served.lines if line.startswith("realizar: "))
    assert "for one request of 512 tokens" in error


def test_a_context_that_does_not_fit_is_halved_and_said(tiny: Path) -> None:
    with serving(tiny, "--kv-cache-bytes", "1200K", "--max-running", "2") as served:
        served.wait_ready()
        said = "".join(served.lines)
        assert "context: 1024 tokens a request, as the model's 2048 do not fit into memory\n" in said


def test_a_taken_port_is_one_clear_error(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "realizar", "serve", str(tiny), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        r"realizar: the server can't listen on 127.0.0.1 port \d+: Address already in use\n", done.stderr
    )


def test_the_apis_process_loads_no_compiler() -> None:
    code = (
        "import sys, realizar.server.run, realizar.server.app;"
        "import realizar.engine.process.supervisor, realizar.engine.loading;"
        "print(sorted({'numba', 'llvmlite', 'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "[]\n"
