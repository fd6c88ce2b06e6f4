"""The server that is attacked: a process of its own, what it logs, and what it holds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from waits import child_commands

HEALTHY_KEY = "healthy-client"
HOSTILE_KEYS = ("hostile-client", "another-hostile-client", "one-more")
_START_S = 300.0
_STOP_S = 120.0
_POLL_S = 0.05
_GRAVE = re.compile(
    r"Traceback|API process .* another one is started|CRITICAL|block audit found|never awaited|Exception ignored",
    re.IGNORECASE,
)
_SIZE = ("--context-length", "1024", "--max-running", "8", "--max-queued", "64", "--kv-cache-bytes", "200M")
_OPEN = (
    *("--allow-request-templates", "--allow-request-priority", "--allow-request-keep-alive", "--embeddings", "last"),
)


class FuzzedServer:
    """A running `realizar serve`. `port` is known once it is ready."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        """Wait until the server says that it is ready.

        Raises:
            RuntimeError: it ended, or did not in time.
        """
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            found = re.search(r"^ready: http://[^:]+:(\d+)", self._said(), re.MULTILINE)
            if found is not None:
                self.port = int(found[1])
                return
            time.sleep(_POLL_S)
        raise RuntimeError(f"the server is not ready: {self._said()[-2000:]}")

    def stop(self) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_STOP_S)

    def grave_lines(self) -> list[str]:
        """Lines of its log that no request may cause."""
        return [line for line in self._said().splitlines() if _GRAVE.search(line)]

    def api_pids(self) -> list[int]:
        """Processes that answer requests; the main process alone where there are no others, else that too."""
        main = self.process.pid
        return [main, *(pid for pid, command in child_commands(main).items() if b"api_process" in command)]

    def peak_mb(self) -> float:
        """The most memory that one of these processes has held."""
        statuses = [Path(f"/proc/{pid}/status").read_text(encoding="ascii") for pid in self.api_pids()]
        found = [re.search(r"VmHWM:\s+(\d+) kB", status) for status in statuses]
        return max((int(peak[1]) * 1024 / 1e6 for peak in found if peak), default=0.0)

    def most_open_files(self) -> int:
        """The most that one of these processes holds. Some may still start, so that a count of before says little."""
        return max(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.api_pids())

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def fuzzed_server(models: Sequence[str], folder: Path, *options: str) -> Iterator[FuzzedServer]:
    """A ready server with several keys, and options beside those of every run; it is ended with the block."""
    keys, log = folder / "keys", folder / "log"
    keys.write_text("\n".join((HEALTHY_KEY, *HOSTILE_KEYS)), encoding="ascii")
    keys.chmod(0o600)
    command = [sys.executable, "-m", "realizar", "serve", "--port", "0", "--api-key-file", str(keys)]
    command += [word for model in models for word in ("--model", model)]
    with log.open("wb") as said:
        process = subprocess.Popen([*command, *_SIZE, *_OPEN, *options], stdout=subprocess.DEVNULL, stderr=said)
    server = FuzzedServer(process, log)
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def figures(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's own figures, by stem, of all models together."""
    text = (await client.get("/metrics")).text
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^realizar:(\w+)\{[^}]*\} ([0-9.e+-]+)$", text, re.MULTILINE):
        found[name] += float(value)  # type: ignore[assignment]
    return dict(found)
