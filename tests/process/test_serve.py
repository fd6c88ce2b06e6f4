"""`realizar serve` as its users meet it: processes, signals, clients that leave, engines that die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from realizar.backends.select import ChosenDevice
from realizar.cli.serve import describe
from realizar.config import EngineConfig
from realizar.engine.core import EngineCore
from realizar.engine.process_loop import EngineLoop
from realizar.engine.process_messages import Event, Ready, Shutdown
from scripted_backend import ScriptedBackend, make_spec
from tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(240)

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 1800, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


class Served:
    """A server process, and what it has said."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "realizar", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            self.lines.extend(stderr)

    def wait_line(self, pattern: str, timeout_s: float = 150) -> re.Match[str]:
        """The first line that matches."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            for line in list(self.lines):
                match = re.search(pattern, line)
                if match:
                    return match
            assert self.process.poll() is None or self._reader.is_alive(), "".join(self.lines)
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in: {''.join(self.lines)}")

    def wait_ready(self) -> str:
        """The server's address."""
        return self.wait_line(r"^ready: (\S+)").group(1)

    def wait_exit(self, timeout_s: float = 20) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        return int(children.split()[0])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(5)


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Served]:
    served = Served(*arguments)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Served]:
    """One server for the tests that leave it as it was: 4 run, 4 wait."""
    with serving(tiny, "--max-running", "4", "--max-queued", "4") as served:
        served.wait_ready()
        yield served


class Stream:
    """A streamed completion that a thread reads."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.begun = threading.Event()
        self.status = 0
        self.finish: str | None = None
        self.error: str | None = None
        self.ended_s = 0.0
        self._client = httpx.Client(timeout=60)
        self._thread = threading.Thread(target=self._read, args=(f"{url}/v1/completions", {**LONG, **fields}))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with self._client.stream("POST", url, json=body) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.error = self.error or f"broken off: {error!r}"
        finally:
            self.ended_s = time.monotonic()
            self.begun.set()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        self.begun.set()
        self.finish = self.finish or chunk["choices"][0]["finish_reason"]

    def join(self, timeout_s: float = 60) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        self._client.close()


def leave_early(url: str, *, after_first: bool) -> None:
    """Send a request over a bare socket and go away: after the first piece, or while it waits."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    with socket.create_connection((host, int(port)), 10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        got = b""
        while after_first and b"data: {" not in got:
            got += connection.recv(4096)


def figure(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=10).text
    match = re.search(rf"^realizar:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert match, text
    return float(match.group(1))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def short_text(url: str) -> str:
    response = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=30)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_it_says_what_it_chose(server: Served) -> None:
    server.wait_ready()
    said = "".join(server.lines)
    assert "context: 2048 tokens a request\n" in said
    assert "answers: 4 at once, 4 queued\n" in said
    assert re.search(r"^KV cache: [\d.]+ [MG]B of f16 for \d+ tokens$", said, re.MULTILINE)
    assert re.search(r"^threads: \d+$", said, re.MULTILINE)


def test_a_gpu_is_named_in_place_of_threads() -> None:
    core = EngineCore(ScriptedBackend(), make_spec((None,)), EngineConfig(), device=ChosenDevice("cuda", 1, "NVIDIA X"))
    events: list[Event] = []
    loop = EngineLoop(events.append)
    loop.post(Shutdown())
    loop.run(lambda: core)
    (ready,) = events
    assert isinstance(ready, Ready)
    assert describe(ready.info, EngineConfig(), 256, None)[-1] == "device: cuda:1, NVIDIA X"


def test_models_answer_while_the_weights_load(tiny: Path) -> None:
    with serving(tiny) as served:
        url = served.wait_line(r"being loaded; (\S+) answers already").group(1)
        models = httpx.get(f"{url}/v1/models", timeout=30).json()
        assert models["data"][0]["id"] == "tiny"
        states = [(httpx.get(f"{url}/{name}", timeout=30).status_code) for name in ("health", "ready")]
        assert states in ([200, 503], [200, 200])
        assert served.wait_ready() == url
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200


def test_a_killed_engine_is_told_to_all_and_replaced(server: Served) -> None:
    url = server.wait_ready()
    before = short_text(url)
    streams = [Stream(url) for _ in range(4)]
    assert all(stream.begun.wait(20) for stream in streams)
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[httpx.Response]] = [
            pool.submit(httpx.post, f"{url}/v1/completions", json=SHORT, timeout=30) for _ in range(2)
        ]
        pid = server.engine_pid
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            stream.join(5)
        assert max(stream.ended_s for stream in streams) - killed_s < 1.5
        for stream in streams:
            assert stream.error is not None
            assert "engine stopped" in stream.error
            assert stream.finish is None
        assert {future.result().status_code for future in waiting} <= {200, 500, 503}
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
    assert wait_until(lambda: httpx.get(f"{url}/ready", timeout=10).status_code == 200, 30)
    assert server.engine_pid != pid
    assert short_text(url) == before
    restarts = re.search(
        r"^realizar:engine_restarts_total\{.*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE
    )
    assert restarts is not None
    assert float(restarts.group(1)) == 1


@pytest.mark.parametrize("after_first", [True, False], ids=["mid-stream", "mid-wait"])
def test_a_client_that_leaves_frees_its_blocks(server: Served, after_first: bool) -> None:
    url = server.wait_ready()
    others = [] if after_first else [Stream(url, max_tokens=900) for _ in range(4)]
    assert all(other.begun.wait(20) for other in others)
    leave_early(url, after_first=after_first)
    if after_first:
        assert wait_until(lambda: figure(url, "num_requests_running") == 0, 1.5)
    else:
        assert wait_until(lambda: figure(url, "num_requests_waiting") == 0, 1.5)
        assert figure(url, "num_requests_running") > 0
    for other in others:
        other.join()
        assert other.finish == "length"
    assert wait_until(lambda: figure(url, "kv_cache_usage_perc") == 0, 1.5)


def test_a_full_queue_is_refused_with_a_time(server: Served) -> None:
    url = server.wait_ready()
    streams = [Stream(url, max_tokens=700) for _ in range(8)]
    try:
        assert wait_until(lambda: figure(url, "num_requests_running") + figure(url, "num_requests_waiting") == 8, 10)
        refused = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=30)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    finally:
        for stream in streams:
            stream.join()
    assert [stream.finish for stream in streams] == ["length"] * 8
    assert short_text(url)


def test_sigterm_ends_all_that_was_accepted(tiny: Path) -> None:
    with serving(tiny, "--max-running", "2") as served:
        url = served.wait_ready()
        streams = [Stream(url, max_tokens=800) for _ in range(4)]
        assert wait_until(lambda: figure(url, "num_requests_running") + figure(url, "num_requests_waiting") == 4, 10)
        engine_pid = served.engine_pid
        served.process.send_signal(signal.SIGTERM)
        served.wait_line("shutting down once open requests have ended")
        late = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=30)
        assert (late.status_code, "retry-after" in late.headers) == (503, True)
        for stream in streams:
            stream.join()
        assert [(stream.finish, stream.error) for stream in streams] == [("length", None)] * 4
        assert served.wait_exit() == 0
        assert not alive(engine_pid)


def test_a_second_signal_stops_at_once(tiny: Path) -> None:
    with serving(tiny, "--max-running", "2") as served:
        url = served.wait_ready()
        streams = [Stream(url) for _ in range(16)]
        assert streams[0].begun.wait(20)
        engine_pid = served.engine_pid
        served.process.send_signal(signal.SIGTERM)
        served.wait_line("shutting down")
        sent_s = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        assert served.wait_exit() == 128 + signal.SIGINT
        assert time.monotonic() - sent_s < 3
        for stream in streams:
            stream.join(5)
        assert any(stream.finish is None for stream in streams)
        assert not alive(engine_pid)
        assert "Traceback" not in "".join(served.lines)


def test_no_engine_is_left_when_the_server_is_killed(tiny: Path) -> None:
    with serving(tiny) as served:
        stream = Stream(served.wait_ready())
        assert stream.begun.wait(20)
        engine_pid = served.engine_pid
        assert alive(engine_pid)
        served.process.kill()
        assert wait_until(lambda: not alive(engine_pid), 2)
        stream.join(5)


def failure(*arguments: str | Path) -> tuple[int, list[str]]:
    """Exit status and error lines of a server that can't start."""
    with serving(*arguments) as served:
        status = served.wait_exit(60)
        assert "Traceback" not in "".join(served.lines)
        return status, [line.strip() for line in served.lines if line.startswith("realizar: ")]


def test_a_broken_model_is_one_clear_error(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:-100_000])
    status, errors = failure(broken)
    assert status == 1
    assert len(errors) == 1
    assert str(broken) in errors[0]


def test_what_only_the_engine_finds_is_one_clear_error(tiny: Path) -> None:
    status, errors = failure(tiny, "--kv-cache-bytes", "1K")
    assert status == 1
    assert len(errors) == 1
    assert "KV cache of one request" in errors[0]


def test_a_context_that_does_not_fit_is_halved_and_said(tiny: Path) -> None:
    with serving(tiny, "--kv-cache-bytes", "1200K", "--max-running", "2") as served:
        served.wait_ready()
        said = "".join(served.lines)
        assert "context: 1024 tokens a request, as the model's 2048 do not fit into memory\n" in said


def test_a_taken_port_is_one_clear_error(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "realizar", "serve", str(tiny), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"realizar: can't listen on 127.0.0.1 port \d+: Address already in use\n", done.stderr)


def test_the_apis_process_loads_no_compiler() -> None:
    code = (
        "import sys, realizar.cli.serving, realizar.server.app, realizar.engine.supervisor, realizar.engine.loading;"
        "print(sorted({'numba', 'llvmlite', 'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
