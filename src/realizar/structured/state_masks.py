"""`StateMasks`: masks of one grammar by state, so that each is computed once for all its rows. numpy only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

State = TypeVar("State", bound=Hashable)

_MOST_BYTES = 32 << 20  # of masks; those used longest ago are dropped first


class StateMasks(Generic[State]):
    """Masks by state. Rows in equal states have the same masks. A class for each kind of grammar has its own states.

    Attributes:
        start: the state of a row without output.
    """

    def __init__(self, start: State) -> None:
        self.start = start
        self._masks: OrderedDict[State, NDArray[np.uint32]] = OrderedDict()

    def after(self, state: State | None, token_id: int) -> State | None:
        """The state after one more token, which the grammar allows; None if it is not known."""
        raise NotImplementedError

    def find(self, state: State | None) -> NDArray[np.uint32] | None:
        """The mask of a state, uint32 [words]; None if it has not been computed yet."""
        if state is None or state not in self._masks:
            return None
        self._masks.move_to_end(state)
        return self._masks[state]

    def keep(self, state: State | None, mask: NDArray[np.uint32]) -> None:
        """Keep a state's mask for other rows."""
        if state is not None:
            self._masks[state] = mask.copy()
            if len(self._masks) * mask.nbytes > _MOST_BYTES:
                self._masks.popitem(last=False)
