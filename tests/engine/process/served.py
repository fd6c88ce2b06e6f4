"""A server process and its clients, as the tests of this folder use them. Waiting ends with an event, or as a hang."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from engine.process import held_serve
from waits import HANG_S, child_pids, is_alive, wait_until

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "Once", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


class Served:
    """A server process, and what it has said.

    Args:
        arguments: of `realizar serve`, without the port. The engine computes on one thread unless they say more or
            there are replicas: other workers' servers take the other cores.
        hold: a folder of files that hold its engine up (`held_serve`); None runs the command itself.
    """

    def __init__(self, *arguments: str | Path, hold: Path | None = None) -> None:
        program = ["-m", "realizar"] if hold is None else [held_serve.__file__, str(hold)]
        given = {"--threads", "--replicas"} & set(arguments)
        threads = [] if given else ["--threads", "1"]
        command = [sys.executable, *program, "serve", *map(str, arguments), *threads, "--port", "0"]
        self._hold = held_serve.Hold(Path("nowhere") if hold is None else hold)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            self.lines.extend(stderr)

    def wait_line(self, pattern: str, timeout_s: float = HANG_S) -> re.Match[str]:
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

    def wait_exit(self) -> int:
        status = self.process.wait(HANG_S)
        self._reader.join(HANG_S)
        return status

    @property
    def engine_pid(self) -> int:
        return child_pids(self.process.pid)[0]

    @contextmanager
    def held_steps(self, between_s: float = 0.4, num_at_once: int = 2) -> Iterator[None]:
        """Meanwhile a long stream does not end: see `held_serve`."""
        self._hold.hold_steps(between_s, num_at_once)
        try:
            yield
        finally:
            self._hold.steps.unlink(missing_ok=True)

    @contextmanager
    def held_loading(self) -> Iterator[None]:
        """Meanwhile no engine that starts loads."""
        self._hold.loading.touch()
        try:
            yield
        finally:
            self._hold.loading.unlink(missing_ok=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HANG_S)
        self._reader.join(HANG_S)


@contextmanager
def serving(*arguments: str | Path, hold: Path | None = None) -> Iterator[Served]:
    served = Served(*arguments, hold=hold)
    try:
        yield served
    finally:
        served.close()


class Stream:
    """A streamed completion that a thread reads."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.begun = threading.Event()
        self.status = 0
        self.finish: str | None = None
        self.error: str | None = None
        self._client = httpx.Client(timeout=HANG_S)
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
            self.begun.set()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        self.begun.set()
        self.finish = self.finish or chunk["choices"][0]["finish_reason"]

    @property
    def is_open(self) -> bool:
        """True if the answer has begun and not ended."""
        return self.begun.is_set() and self._thread.is_alive()

    def wait_begun(self) -> None:
        assert self.begun.wait(HANG_S)

    def join(self) -> None:
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        self._client.close()


@contextmanager
def bare_request(url: str, *, first_delta: bool) -> Iterator[None]:
    """A long stream over a bare socket, cut off at the end of the block.

    Args:
        first_delta: whether the block begins once the first delta of the answer has come.
    """
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    with socket.create_connection((host, int(port)), HANG_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        got = b""
        while first_delta and b"data: {" not in got:
            got += connection.recv(4096)
        yield


def figure(url: str, name: str) -> float:
    """A figure of /metrics."""
    text = httpx.get(f"{url}/metrics", timeout=HANG_S).text
    match = re.search(rf"^realizar:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert match, text
    return float(match.group(1))


def of_replicas(url: str, name: str) -> dict[str, float]:
    """A figure of each replica."""
    text = httpx.get(f"{url}/metrics", timeout=HANG_S).text
    found = re.findall(rf'^realizar:replica_{name}{{model_name="tiny",replica="(\d)"}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def num_ready(url: str) -> int:
    """Replicas that are ready."""
    text = httpx.get(f"{url}/metrics", timeout=HANG_S).text
    return len(re.findall(r'^realizar:replica_state{.*state="ready"} 1.0$', text, re.MULTILINE))


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=HANG_S).status_code == 200


def short_text(url: str, **fields: Any) -> str:
    response = httpx.post(f"{url}/v1/completions", json={**SHORT, **fields}, timeout=HANG_S)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def wait_saved(folder: Path) -> None:
    """Until the server, which is idle, has written no file for two seconds. Its own count is of thousands at once."""
    count, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 2:
        if (now := sum(1 for _ in folder.rglob("*"))) != count:
            count, since_s = now, time.monotonic()
        time.sleep(0.1)


def kill(served: Served) -> None:
    engine = served.engine_pid
    served.process.send_signal(signal.SIGKILL)
    served.process.wait(HANG_S)
    wait_until(lambda: not is_alive(engine))
