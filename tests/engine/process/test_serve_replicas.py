"""`realizar serve --replicas 2`: one server to its users, whichever engine has a request, and whichever dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine.process.served import (
    SHORT,
    Served,
    Stream,
    figure,
    num_ready,
    of_replicas,
    serving,
    short_text,
)
from realizar.backends.machine import allowed_cpus
from realizar.cli.server_records import running_servers, servers_folder
from realizar.config import QUEUED_PER_ROW, EngineConfig
from realizar.engine.process.main import take_place
from realizar.engine.process.messages import Load
from realizar.replicas.places import places_on_cores, read_cores
from waits import HANG_S, child_commands, is_alive, wait_until
from wider import wider

REPLICAS = ("--replicas", "2", "--max-running", "2")
ROOM = 2 * 2 * (1 + QUEUED_PER_ROW)  # answers that run and wait


@pytest.fixture(scope="module", params=wider([1, 2], 2), ids="{} API processes".format)
def server(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as it was: 2 answers run in each replica."""
    hold = tmp_path_factory.mktemp("hold")
    with serving(tiny, *REPLICAS, "--api-processes", f"{request.param}", hold=hold) as served:
        served.wait_ready()
        yield served


def engine_pids(served: Served) -> set[int]:
    children = child_commands(served.process.pid)
    return {pid for pid, command in children.items() if b"api_process" not in command}


def prompt_of(family: int, last: int) -> list[int]:
    """200 tokens, of which a family shares six blocks."""
    return [20 + family] * 199 + [30 + last]


def cached_tokens(url: str, prompt: list[int]) -> int:
    body = {**SHORT, "prompt": prompt, "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_each_replica_runs_on_its_cores(server: Served) -> None:
    server.wait_ready()
    threads = [list(Path(f"/proc/{pid}/task").iterdir()) for pid in engine_pids(server)]
    allowed = [{tuple(sorted(os.sched_getaffinity(int(each.name)))) for each in listed} for listed in threads]
    assert all(len(places) == 1 for places in allowed)  # every thread of an engine
    planned = places_on_cores(read_cores(allowed_cpus()), 2)
    assert sorted(places.pop() for places in allowed) == sorted(place.cpus for place in planned)


def test_a_process_sees_the_gpus_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    take_place(Load("m", EngineConfig()))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    take_place(Load("m", EngineConfig(), visible_gpus="1"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_lines_of_requests_name_the_replica(server: Served) -> None:
    url = server.wait_ready()
    assert short_text(url)
    server.wait_line(r"POST /v1/completions 200 .*cached=\d+ .*replica=[01]")


def test_families_stay_with_their_replicas(server: Served) -> None:
    url = server.wait_ready()
    before = of_replicas(url, "prompt_tokens_total")
    families = range(6)
    assert [cached_tokens(url, prompt_of(family, 0)) for family in families] == [0] * 6
    for last in (1, 2, 3):
        assert [cached_tokens(url, prompt_of(family, last)) for family in families] == [192] * 6
    after = of_replicas(url, "prompt_tokens_total")
    assert sum(after.values()) == figure(url, "prompt_tokens_total")
    assert all(after[replica] > before[replica] for replica in ("0", "1"))
    assert sum(of_replicas(url, "known_blocks").values()) >= 36


def test_a_salt_keeps_prefixes_apart(server: Served) -> None:
    url, prompt = server.wait_ready(), prompt_of(7, 0)
    for salt, cached in (("a", 0), ("a", 192), ("b", 0), ("b", 192)):
        body = {**SHORT, "prompt": prompt, "max_tokens": 2, "cache_salt": salt}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_a_killed_replica_costs_its_running_requests_alone(server: Served) -> None:
    url = server.wait_ready()
    before, restarts = short_text(url), figure(url, "engine_restarts_total")
    with server.held_steps():
        running = [Stream(url, prompt=prompt_of(8 + number, 0)) for number in range(4)]
        for stream in running:
            stream.wait_begun()
        assert of_replicas(url, "requests") == {"0": 2, "1": 2}
        queued = [Stream(url, prompt=prompt_of(12 + number, 0)) for number in range(4)]
        wait_until(lambda: of_replicas(url, "requests") == {"0": 4, "1": 4})
        os.kill(min(engine_pids(server)), signal.SIGKILL)
        wait_until(lambda: sum(not stream.is_open for stream in running) == 2)
        assert not any(stream.error for stream in queued)
        wait_until(lambda: figure(url, "replica_moved_requests_total") > 0)
    for stream in (*running, *queued):
        stream.join()
    assert sorted(str(stream.finish) for stream in running) == ["None", "None", "length", "length"]
    assert all("engine stopped" in str(stream.error) for stream in running if stream.finish is None)
    assert {(stream.finish, stream.error) for stream in queued} == {("length", None)}
    wait_until(lambda: num_ready(url) == 2)
    assert figure(url, "engine_restarts_total") == restarts + 1
    assert {short_text(url) for _ in range(4)} == {before}
    server.wait_line(r"replica \d: the engine process was killed by SIGKILL; another engine is started")


def test_replicas_restart_one_by_one_and_no_request_fails(server: Served) -> None:
    """With as many clients as the server has room for, whose requests do not run ahead of one another."""
    url = server.wait_ready()
    wait_until(lambda: num_ready(url) == 2)
    before, whole = engine_pids(server), short_text(url, max_tokens=2)
    ended = threading.Event()

    def ask() -> set[str]:
        texts: set[str] = set()
        while not ended.is_set():
            texts.add(short_text(url, max_tokens=2))
        return texts

    with server.held_steps(0.1, 0), ThreadPoolExecutor(ROOM) as clients:
        asking = [clients.submit(ask) for _ in range(ROOM)]
        server.process.send_signal(signal.SIGHUP)
        try:
            wait_until(
                lambda: num_ready(url) == 2 and len(engine_pids(server)) == 2 and not engine_pids(server) & before
            )
        finally:
            ended.set()
        assert [each.result() for each in asking] == [{whole}] * ROOM


def test_it_is_listed_drains_and_leaves_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with serving(tiny, *REPLICAS, hold=tmp_path) as served:
        url = served.wait_ready()
        (record,) = running_servers(servers_folder())
        assert (record.state, record.replica_states) == ("ready", ["ready", "ready"])
        children = engine_pids(served)
        assert len(children) == 2
        with served.held_steps():
            streams = [Stream(url) for _ in range(3)]
            for stream in streams:
                stream.wait_begun()
            served.process.send_signal(signal.SIGTERM)
            served.wait_line(r"shuts down when the open requests have ended \(3\)")
        for stream in streams:
            stream.join()
        assert {(stream.finish, stream.error) for stream in streams} == {("length", None)}
        assert served.wait_exit() == 0
        wait_until(lambda: not any(map(is_alive, children)))


def test_what_can_not_be_is_refused_by_name(tiny: Path, refusal: Callable[..., str]) -> None:
    for words, said in (
        (("--replicas", "0"), "--replicas must be between 1 and 64, not 0"),
        (("--replicas", "2", "--model-folder", tiny.parent), "--replicas above 1 serve a single model"),
        (("--replicas", "2", "--device", "cuda:1"), "each replica has its own: use --device cuda"),
        (("--replicas", "2", "--kv-cache-bytes", "900G"), "the model does not fit"),
    ):
        assert said in refusal(tiny, *words)
