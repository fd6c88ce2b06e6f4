"""`JsonMasks`: masks of one JSON schema by the place in its texts, so that each is computed once. Standard library."""

from __future__ import annotations

import json
from collections.abc import Sequence

from realizar.structured.json_places import JsonPlaces, Place
from realizar.structured.state_masks import StateMasks

_MOST_PLACES = 20_000
_MOST_STEPS = 100_000  # from a place with a token to the next place


class JsonMasks(StateMasks):
    """Masks by place, for all rows of the schema. Places are numbered, each different one once.

    Attributes:
        places: the places of its texts.
        token_bytes: text of each id.
    """

    def __init__(self, places: JsonPlaces, token_bytes: Sequence[bytes]) -> None:
        super().__init__(0)
        self.places, self.token_bytes = places, token_bytes
        self._places = [places.start]
        self._numbers = {places.start: 0}
        self._steps: dict[tuple[int, int], int] = {}

    def place(self, state: int) -> Place:
        """The place of that number."""
        return self._places[state]

    def after(self, state: int | None, token_id: int) -> int | None:
        if state is None:
            return None
        found = self._steps.get((state, token_id))
        if found is None:
            place = self.places.after(self._places[state], self.token_bytes[token_id])
            if place is None or (found := self._number(place)) is None:
                return None
            if len(self._steps) < _MOST_STEPS:
                self._steps[state, token_id] = found
        return found

    def can_keep(self, state: int) -> bool:
        return self._places[state].is_known

    def _number(self, place: Place) -> int | None:
        """The number of a place; None if there are too many."""
        found = self._numbers.get(place)
        if found is None and len(self._places) < _MOST_PLACES:
            found = self._numbers[place] = len(self._places)
            self._places.append(place)
        return found


def json_masks(schema: str, token_bytes: Sequence[bytes]) -> JsonMasks | None:
    """Masks of a schema, which is the text of one; None where all its texts count byte by byte."""
    places = JsonPlaces(json.loads(schema))
    return JsonMasks(places, token_bytes) if places.are_shared else None
