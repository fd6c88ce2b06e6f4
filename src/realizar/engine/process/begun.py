"""An engine's process that is begun before its parent has imported what it serves with: both import at once."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from realizar.ipc.process_limits import start_process

if TYPE_CHECKING:
    from realizar.engine.process.messages import Load

ENGINE_COMMAND = (sys.executable, "-m", "realizar.engine.process.main")


class BegunEngine:
    """A process that a command starts, as of `ProcessLink`; whoever begins it ends it, if it is not taken until then.

    Raises OSError where it can't be started.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._process, self._socket = start_process(command, output=subprocess.PIPE)
        self._is_taken = False

    def send(self, load: Load) -> None:
        """Have it load, while nobody looks after it yet. Its end is seen by whoever takes it."""
        from realizar.ipc.frames import encode_frame

        with suppress(OSError):
            self._socket.sendall(encode_frame(load))

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process, and the socket to it, which the caller ends."""
        self._is_taken = True
        return self._process, self._socket

    def end(self) -> None:
        if self._is_taken:
            return
        self._is_taken = True
        self._socket.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
