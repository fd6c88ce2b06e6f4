"""Servers that a load starts itself: realizar's own and llama.cpp's, each a process of its own on a free port."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from realizar.errors import CapacityError, HubError

_POLL_S = 0.1
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class ServerSize:
    """The size of a server to start: `parallel` requests at a time, each of up to `context_length` tokens.

    `threads` and `api_processes` None leave them to the server. The latter and `replicas` are of realizar's own.
    """

    parallel: int
    context_length: int
    threads: int | None = None
    start_timeout_s: float = 300.0
    api_processes: int | None = None
    replicas: int = 1


def llama_server(program: Path, model: Path, size: ServerSize) -> AbstractContextManager[str]:
    """Runs llama.cpp's server, `program`, while a block lasts; gives its address.

    HubError: the program is not there. CapacityError, with its last words: it ends or does not answer in time.
    """
    if not program.is_file():
        raise HubError(f"llama-server was not found: {program}")
    options = ["--parallel", str(size.parallel), "--ctx-size", str(size.parallel * size.context_length), "--metrics"]
    if size.threads is not None:
        options += ["--threads", str(size.threads), "--threads-batch", str(size.threads)]
    command = [str(program), "--model", str(model), *options]
    return _running(command, "/health", library_environment(program), size.start_timeout_s)


def library_environment(program: Path) -> dict[str, str]:
    """This process's environment, with the program's folder among those searched for shared libraries."""
    paths = [str(program.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def realizar_server(model: str, size: ServerSize) -> AbstractContextManager[str]:
    """Runs `realizar serve` while a block lasts; gives its address. Raises CapacityError as `llama_server`."""
    options = ["--max-running", str(size.parallel), "--context-length", str(size.context_length)]
    options += ["--replicas", str(size.replicas)]
    if size.api_processes is not None:
        options += ["--api-processes", str(size.api_processes)]
    if size.threads is not None:
        options += ["--threads", str(size.threads)]
    command = [sys.executable, "-m", "realizar", "serve", model, *options]
    return _running(command, "/ready", None, size.start_timeout_s)


@contextmanager
def _running(
    command: Sequence[str], health: str, environment: dict[str, str] | None, start_timeout_s: float
) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=words, stderr=words, env=environment
        )
        try:
            _wait(process, port, health, start_timeout_s)
            yield f"http://127.0.0.1:{port}"
        except TimeoutError as error:
            words.seek(0)
            lines = words.read().decode(errors="replace").strip().splitlines()
            raise CapacityError(f"{Path(command[0]).name} {error}: {lines[-1] if lines else 'no message'}") from None
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, health: str, timeout_s: float) -> None:
    """Wait until the server answers that it is ready. It raises TimeoutError if it does not, or has ended."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise TimeoutError(f"ended with status {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", health)
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not up yet
        finally:
            connection.close()
        time.sleep(_POLL_S)
    raise TimeoutError(f"does not answer within {timeout_s:g} s")
