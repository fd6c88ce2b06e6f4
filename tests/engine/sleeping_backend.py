"""`SleepingBackend`: a scripted backend that can sleep, and loses its KV cache by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from realizar.backends.base import ForwardInput, Transfer
from realizar.errors import RealizarError
from scripted_backend import ScriptedBackend, ScriptedStep, require


class SleepingBackend(ScriptedBackend):
    """Attributes: log: `sleep` and `wake`. refusal: what the next of them fails with."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.log: list[str] = []
        self.refusal: RealizarError | None = None
        self._asleep = False

    def sleep(self) -> Transfer:
        require(not self._asleep and not self.rows, "asleep already, or a row is open")
        return self._move("sleep")

    def wake(self) -> Transfer:
        require(self._asleep, "not asleep")
        for values, positions in zip(self._values, self._positions, strict=True):
            values[:] = np.uint64(0)
            positions[:] = -1
        return self._move("wake")

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        require(not self._asleep, "a step while asleep")
        return super().submit(forward_input)

    def _move(self, what: str) -> Transfer:
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        self.log.append(what)
        self._asleep = what == "sleep"
        return Transfer(1000, 0.5)
