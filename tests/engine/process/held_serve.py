"""`realizar serve` whose engine waits for a test: `python held_serve.py FOLDER serve MODEL ...`.

While FOLDER holds a file `loading`, no engine loads. While it holds a file `steps`, each step begins so many seconds
after the one before as the file says, but for some after a request has come: with 0.4 s and 2 steps, a stream of 200
tokens stays open for at least a minute on any machine, and begins at once. The engine itself is the real one:
`python held_serve.py FOLDER DESCRIPTOR`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realizar.engine.core.engine_core import EngineCore
    from realizar.engine.process.loop import EngineLoop
    from realizar.engine.process.messages import Load

_TICK_S = 0.002


class Hold:
    """The files by which a test holds an engine up."""

    def __init__(self, folder: Path) -> None:
        self.loading, self.steps = folder / "loading", folder / "steps"

    def wait_loading(self) -> None:
        while self.loading.exists():
            time.sleep(_TICK_S)

    def hold_steps(self, between_s: float, num_at_once: int) -> None:
        """Also called to change what is held. `num_at_once`: steps after each request that wait for nothing."""
        written = self.steps.with_suffix(".new")
        written.write_text(f"{between_s} {num_at_once}")
        written.replace(self.steps)

    def held_steps(self) -> tuple[float, int]:
        """See `hold_steps`; zeros while nothing is held."""
        try:
            between_s, num_at_once = self.steps.read_text().split()
        except FileNotFoundError:
            return 0.0, 0
        return float(between_s), int(num_at_once)


def held_loop(hold: Hold) -> type[EngineLoop]:
    """A loop that obeys commands while its steps wait."""
    from realizar.engine.process import messages
    from realizar.engine.process.loop import EngineLoop

    class HeldLoop(EngineLoop):
        _stepped_s, _num_since_request = 0.0, 0

        def handle(self, core: EngineCore, command: Any) -> None:
            if isinstance(command, messages.Add):
                self._num_since_request = 0
            super().handle(core, command)

        def step(self, core: EngineCore) -> None:
            between_s, num_at_once = hold.held_steps()
            if self._num_since_request >= num_at_once and time.monotonic() < self._stepped_s + between_s:
                with self._news:
                    if not self._inbox:
                        self._news.wait(_TICK_S)
                return
            super().step(core)
            self._stepped_s = time.monotonic()
            self._num_since_request += 1

    return HeldLoop


def run_engine(folder: Path, descriptor: int) -> int:
    from realizar.engine.process import main

    hold = Hold(folder)
    main.EngineLoop = held_loop(hold)  # type: ignore[misc]

    def load(command: Load, progress: Callable[[str, float], None]) -> EngineCore:
        hold.wait_loading()
        return main.load_model(command, progress)

    return main.run_process(descriptor, load)


def run_server(folder: Path, words: list[str]) -> None:
    from realizar.cli.main import main
    from realizar.engine.process import begun, child, supervisor
    from realizar.server.processes import hub

    # That a process is stopped is seen five times as soon.
    hub.LivenessPolicy = partial(child.LivenessPolicy, ping_interval_s=0.2, max_missed_pings=150)  # type: ignore[misc, assignment]
    command = (sys.executable, __file__, str(folder))
    begun.BegunEngine = partial(begun.BegunEngine, command)  # type: ignore[misc, assignment]
    supervisor.ProcessLink = partial(supervisor.ProcessLink, command=command)  # type: ignore[misc, assignment]
    sys.argv = ["realizar", *words]
    main()


if __name__ == "__main__":
    if sys.argv[2].isdigit():
        sys.exit(run_engine(Path(sys.argv[1]), int(sys.argv[2])))
    run_server(Path(sys.argv[1]), sys.argv[2:])
