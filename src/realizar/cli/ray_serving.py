"""`realizar serve --ray`: it has Ray Serve start the application, and ends it on a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any, Self

from realizar.cli.server_records import ServerRecord, announced, pid_namespace
from realizar.cli.terminal.printable import printable
from realizar.ray.options import RayOptions
from realizar.ray.running import Door, start_application, stop_application

_POLL_S = 0.2


def serve_with_ray(model: str, options: RayOptions, door: Door, address: str | None, url: str) -> int:
    """Serve until a signal; the exit status is 0, or 128 plus the number of a second signal.

    Args:
        address: of the cluster; None takes RAY_ADDRESS, else this host's cluster.
        url: where this host answers.

    Raises:
        RealizarError: Ray Serve is not installed, or the application can't be started.
    """
    with _Signals() as signals:
        _report(f"{model} is being loaded by Ray Serve")
        application = start_application(model, options, door, address)
        record = ServerRecord(os.getpid(), pid_namespace(), url, list(application.names), time.time())
        with announced(record) as listed:
            listed.update(state="ready")
            signals.interrupt = False
            _report(f"engines: {options.min_replicas} to {options.max_replicas}, {application.placement}")
            _report(f"ready: {url}")
            signals.first.wait()
            listed.update(state="draining")
            _report("the server shuts down when the open requests have ended; a second signal stops it at once")
            stopping = threading.Thread(target=stop_application, args=(application,), daemon=True)
            stopping.start()
            while stopping.is_alive() and not signals.later:
                stopping.join(_POLL_S)
    return 128 + signals.later[0] if signals.later else 0


class _Signals:
    """SIGTERM and SIGINT.

    Attributes:
        interrupt: True while a signal interrupts what is going on: the start, which may wait for ever for a host.
        first: set by the first signal. later: the numbers of those after it.
    """

    def __init__(self) -> None:
        self.interrupt, self.first = True, threading.Event()
        self.later: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.interrupt:
            raise KeyboardInterrupt
        if self.first.is_set():
            self.later.append(number)
        self.first.set()


def _report(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
