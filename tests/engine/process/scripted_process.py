"""An engine process around the scripted backend: `python scripted_process.py OPTIONS FD`, OPTIONS in JSON.

`dies`: `loading` exits, `silent` never says a word, `refuses` says it can't load, `lost` that it lost a device in the
load, `capture` while it captures graphs, `step` fails at the tenth step, `frame` sends bytes that are no frame, `hangs`
never ends its tenth step, `poison` is killed by a request whose prompt holds 77. `holds`: a file that is written when a
step has `rows` rows (8 by default), which then waits until the file is gone. `slow`: a file; while it is there a step
takes longer. `loads`: a file that is written when the engine begins to load, which then waits until the file is gone.
`model`: a file that must be whole to be loaded. `spawns`: a file whose lines are the engines started; with `mends`,
only the first one dies or holds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # a program has only its own folder on the path

from realizar.backends.base import ForwardInput
from realizar.backends.load_progress import LoadProgress
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.process.main import run_process
from realizar.engine.process.messages import Load
from realizar.errors import CapacityError, CaptureLostError, DeviceLostError
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.workers.service import GrammarService
from resolving import new_core
from scripted_backend import VOCAB_SIZE, ScriptedBackend, ScriptedStep, make_spec
from step_inputs import rows_of


def hold(file: str) -> None:
    """Say by a file that the engine waits, and wait until it is gone."""
    Path(file).touch()
    while Path(file).exists():
        time.sleep(0.005)


class FaultyBackend(ScriptedBackend):
    """A scripted backend that waits and fails by a script."""

    def __init__(self, dies: str, holds: str, rows: int, slow: str) -> None:
        super().__init__(num_blocks=(1024,), max_rows=8, fail_at=10 if dies == "step" else None)
        self.dies, self.holds, self.hold_rows, self.slow = dies, holds, rows, slow

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.1)
        if self.holds and len(rows_of(forward_input)) >= self.hold_rows:
            hold(self.holds)
            self.holds = ""
        if self.num_steps >= 10 and self.dies == "hangs":
            time.sleep(1000)
        if self.num_steps >= 10 and self.dies == "frame":
            os.write(int(sys.argv[-1]), b"\0\0\0\3abc")
            time.sleep(1000)
        if self.dies == "poison" and any(77 in row.tokens[: row.num_prompt_tokens] for row in self.rows.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().submit(forward_input)


def new_grammars() -> GrammarService:
    """Ids are characters of ASCII from the space on; then the end, and what no grammar allows."""
    letters = [bytes((0x20 + index,)) for index in range(94)]
    return GrammarService(GrammarTokens([*letters, b"<end>"], (), (94,), VOCAB_SIZE))


def main() -> int:
    options: dict[str, Any] = json.loads(sys.argv[1])
    dies, holds = options.get("dies", ""), options.get("holds", "")
    if "spawns" in options:
        spawns = Path(options["spawns"])
        with spawns.open("a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {time.monotonic()}\n")
        if options.get("mends") and len(spawns.read_text(encoding="ascii").splitlines()) > 1:
            dies = holds = ""
    if dies == "silent":
        time.sleep(1000)
    if dies == "loading":
        os.write(1, b"about to die\n")
        os._exit(3)

    def load(command: Load, progress: LoadProgress) -> EngineCore:
        progress("reading weights", 0.5)
        logging.getLogger("realizar.scripted").debug("loaded")
        if "loads" in options:
            hold(options["loads"])
        if dies == "refuses":
            raise CapacityError("the weights do not fit")
        if dies == "lost":
            raise DeviceLostError("rank 1 of 2 is gone")
        if dies == "capture" and command.config.graphs:
            raise CaptureLostError("the GPU's context is lost")
        if "model" in options:
            open_checkpoint(options["model"])
        backend = FaultyBackend(dies, holds, options.get("rows", 8), options.get("slow", ""))
        config = EngineConfig(max_step_tokens=1000)
        return new_core(backend, make_spec(backend.windows), config, new_grammars=new_grammars)

    return run_process(int(sys.argv[2]), load)


if __name__ == "__main__":
    sys.exit(main())
