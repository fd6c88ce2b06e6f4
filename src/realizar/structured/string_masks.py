"""`StringMasks`: masks within the strings of a JSON schema, computed before a row comes to their places. numpy only.

Where few characters are left of a string, llguidance looks at most tokens by themselves: these masks take longest. A
schema that has been asked about often gets them while its process has nothing else to do.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from realizar.structured.grammar import GrammarFactory, GrammarMatcher
from realizar.structured.json_masks import JsonMasks
from realizar.structured.json_places import Frames

_LONGEST = 128  # characters of a string whose masks are computed


class StringMasks:
    """The masks of all lengths of the strings that rows have come to."""

    def __init__(self, factory: GrammarFactory, shared: JsonMasks) -> None:
        self._factory, self._shared = factory, shared
        self._letter = factory.letter_id
        self._begun: dict[Frames, int] = {}  # the shortest length from which a string was begun
        self._open: deque[GrammarMatcher] = deque()
        self._mask = np.empty((1, factory.num_words), np.uint32)

    def note(self, matcher: GrammarMatcher) -> None:
        """A row is here: if it is within a string, the masks of greater lengths will be computed."""
        if matcher.state is None or self._letter is None:
            return
        place = matcher.state.place
        most = self._shared.steps.places.most_characters(place)
        if 0 <= most <= _LONGEST and place.length < self._begun.get(place.frames, most):
            self._begun[place.frames] = place.length
            self._open.append(matcher.copy())

    def compute_one(self) -> bool:
        """Compute one mask; False if there is none to compute, or no room for it."""
        if not self._open or not self._shared.has_room(self._mask.nbytes):
            self._open.clear()
            return False
        matcher = self._open[0]
        assert self._letter is not None
        matcher.advance((self._letter,))
        if matcher.error is not None:  # the string is as long as it may be
            self._open.popleft()
        elif self._shared.find(matcher.state) is None:
            self._factory.fill(matcher, (), self._mask)
        return True
