"""`realizar serve` whose engine waits for a test: `python held_serve.py FOLDER serve MODEL ...`.

While FOLDER holds a file `loading`, no engine loads. While it holds a file `steps`, each step takes 0.4 s more, so that
a stream of 200 tokens stays open for at least 80 s, on any machine. The engine itself is the real one:
`python held_serve.py FOLDER DESCRIPTOR`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HELD_STEP_S = 0.4


class Hold:
    """The files by which a test holds an engine up."""

    def __init__(self, folder: Path) -> None:
        self.loading, self.steps = folder / "loading", folder / "steps"

    def wait(self, file: Path, timeout_s: float) -> None:
        """Wait until the file is gone, at most `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while file.exists() and time.monotonic() < until_s:
            time.sleep(0.002)

    def held(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """A step that takes longer while the file is there."""

        def slow_step() -> Any:
            self.wait(self.steps, HELD_STEP_S)
            return step()

        return slow_step


def run_engine(folder: Path, descriptor: int) -> int:
    from realizar.engine.core.engine_core import EngineCore
    from realizar.engine.process.main import load_model, run_process
    from realizar.engine.process.messages import Load

    hold = Hold(folder)

    def load(command: Load, progress: Callable[[str, float], None]) -> EngineCore:
        hold.wait(hold.loading, 600)
        core = load_model(command, progress)
        core.step = hold.held(core.step)  # type: ignore[method-assign]
        return core

    return run_process(descriptor, load)


def run_server(folder: Path, words: list[str]) -> None:
    from realizar.cli.main import main
    from realizar.engine.process import begun, supervisor

    command = (sys.executable, __file__, str(folder))
    begun.BegunEngine = partial(begun.BegunEngine, command)  # type: ignore[misc, assignment]
    supervisor.ProcessLink = partial(supervisor.ProcessLink, command=command)  # type: ignore[misc, assignment]
    sys.argv = ["realizar", *words]
    main()


if __name__ == "__main__":
    if sys.argv[2].isdigit():
        sys.exit(run_engine(Path(sys.argv[1]), int(sys.argv[2])))
    run_server(Path(sys.argv[1]), sys.argv[2:])
