"""`realizar serve --ray`: it has Ray Serve start the application, and ends it on a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from realizar.cli.server_records import ServerRecord, announced, pid_namespace
from realizar.cli.terminal.printable import printable
from realizar.ray.options import RayOptions
from realizar.ray.running import Door, start_application, stop_application


def serve_with_ray(model: str, options: RayOptions, door: Door, address: str | None, url: str) -> int:
    """Serve until a signal; the exit status is 0, or 128 plus the number of a second signal.

    Args:
        address: of the cluster; None takes RAY_ADDRESS, else this host's cluster.
        url: where this host answers.

    Raises:
        RealizarError: Ray Serve is not installed, or the application can't be started.
    """
    with _signals() as (first, second):
        _report(f"{model} is being loaded by Ray Serve")
        application = start_application(model, options, door, address)
        record = ServerRecord(os.getpid(), pid_namespace(), url, list(application.names), time.time())
        with announced(record) as listed:
            listed.update(state="ready")
            _report(f"engines: {options.min_replicas} to {options.max_replicas}, {application.placement}")
            _report(f"ready: {url}")
            first.wait()
            listed.update(state="draining")
            _report("the server shuts down when the open requests have ended; a second signal stops it at once")
            stopping = threading.Thread(target=stop_application, args=(application,), daemon=True)
            stopping.start()
            while stopping.is_alive() and not second:
                stopping.join(0.2)
    return 128 + second[0] if second else 0


@contextmanager
def _signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """The first signal as an event, and the numbers of those after it."""
    first, later = threading.Event(), list[int]()

    def note(number: int, frame: object) -> None:
        if first.is_set():
            later.append(number)
        first.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield first, later
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
