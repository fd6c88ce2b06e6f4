"""A fork server whose workers end, hang or are slow at what a test says: `python deadly_server.py SOCKET MASKS`.

A regular expression's last alternative names what a worker does: `|crash`, `|hang` or `|quit` once a row has sampled
the byte `f`, `|slow` at each answer, and `|load-crash` when it is compiled among other grammars.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from realizar.structured.workers.fork_server import ForkServer, main
from realizar.structured.workers.messages import Follow, Load
from realizar.structured.workers.worker import WorkerLimits
from realizar.structured.workers.worker_process import WorkerProcess, _Row
from structured.grammar_walks import TOKENS

COMMAND = (sys.executable, __file__)
DEADLY = TOKENS.index(b"f")
SLOW_S = 0.02


class DeadlyWorker(WorkerProcess):
    """Does what the expression of a row says."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_shared = arguments[-1] > WorkerLimits().memory_bytes
        self._does: dict[int, str] = {}
        self._last: dict[int, int] = {}

    def _load(self, command: Load) -> None:
        self._does[command.grammar] = does = command.structured.value.rpartition("|")[2]
        if does == "load-crash" and self._is_shared:
            self._work_on(-command.grammar)
            os.kill(os.getpid(), signal.SIGSEGV)
        super()._load(command)

    def _follow(self, command: Follow) -> None:
        super()._follow(command)
        self._last[command.key] = command.token_ids[-1] if command.token_ids else -1

    def _answer(self, row: _Row) -> None:
        if (count := int(self._memory.num_tokens[row.slot])) > 0:
            self._last[row.key] = int(self._memory.tokens[row.slot, count - 1])
        does = self._does[row.loaded.number]
        if self._last[row.key] == DEADLY or does == "slow":
            _do(does)
        super()._answer(row)


def _do(what: str) -> None:
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "hang":
        time.sleep(10**6)
    elif what == "quit":
        os._exit(3)
    elif what == "slow":
        started_s = time.thread_time()
        while time.thread_time() - started_s < SLOW_S:
            pass


class DeadlyServer(ForkServer):
    """Forks such workers."""

    new_worker = DeadlyWorker


if __name__ == "__main__":
    sys.exit(main(DeadlyServer))
