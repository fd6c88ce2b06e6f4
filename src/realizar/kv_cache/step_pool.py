"""`StepPool`: numbers of rows or snapshots, none of which is used again while a submitted step names it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class StepPool:
    """Hands out the numbers 0 .. total - 1, smallest first at the start. `kind` is a word for them in errors."""

    def __init__(self, total: int, kind: str) -> None:
        self._kind = kind
        self._free = list(range(total - 1, -1, -1))
        self._steps = np.zeros(total, np.int32)  # that name each number
        self._draining: set[int] = set()  # released, and named by a step
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_released(self) -> int:
        """Numbers that are released and not free yet."""
        return len(self._draining) + len(self._released)

    def is_named(self, number: int) -> bool:
        """True if a step that is not done names it."""
        return bool(self._steps[number])

    def take(self) -> int:
        """The caller has checked `num_free`."""
        return self._free.pop()

    def submitted(self, numbers: NDArray[np.intp]) -> None:
        """Note that a step with these numbers, intp [numbers], all different, was submitted."""
        self._steps[numbers] += 1

    def finished(self, numbers: NDArray[np.intp]) -> None:
        """Note that a step with these numbers, intp [numbers], all different, is done, or was given up."""
        self._steps[numbers] -= 1
        if self._draining:
            done = [number for number in numbers.tolist() if number in self._draining and not self._steps[number]]
            self._draining.difference_update(done)
            self._released += done

    def release(self, number: int) -> None:
        """Give a number back; it is free after the steps that name it and the next `take_released`."""
        if self._steps[number]:
            self._draining.add(number)
        else:
            self._released.append(number)

    def take_released(self) -> list[int]:
        """The released numbers that no step names; from now on they are free."""
        released, self._released = self._released, []
        self._free.extend(reversed(released))
        return released

    def audit(self, owned: Iterable[int]) -> None:
        """Prove that every number is free, owned, draining or released, and only one of these.

        It raises RuntimeError if one is lost or in two states, or steps are counted wrongly.
        """
        numbers, kind = sorted([*self._free, *owned, *self._draining, *self._released]), self._kind
        if numbers != list(range(len(self._steps))):
            raise RuntimeError(f"{kind}s {numbers} are free, owned, draining or released, of {len(self._steps)}")
        if (self._steps < 0).any():
            raise RuntimeError(f"a {kind} has ended more steps than it was in")
        if self._steps[[*self._free, *self._released]].any() or not self._steps[list(self._draining)].all():
            raise RuntimeError(f"a free {kind} is named by a step, or a draining one by none")
