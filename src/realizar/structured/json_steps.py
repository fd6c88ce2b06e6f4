"""`JsonSteps`: the places of one schema's texts as an automaton, whose steps are found once. Standard library only.

`JsonPlaces` says where a text goes on from a place, in some ten microseconds a token. Here each place keeps where each
byte, and each run of spaces, leads once that was asked for; characters of a string are only counted. So most tokens
cost a few looks into dictionaries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from realizar.structured.json_places import Frames, JsonPlaces, Place

_MOST_PLACES = 10_000  # some 5 MB
_MOST_SEEN_BYTES = 2 << 20  # of texts that places hold: a long value whose bytes all count is at many places
_UNIT = re.compile(rb" {2,}|.", re.DOTALL)
_SPACES = 256  # added to the length of a run, for its unit


class StepLostError(Exception):
    """It can't be told where a text leads, or the places are too many."""


class JsonState(dict[int, "JsonState"]):
    """A place, and the places after single units. Each is equal to itself alone.

    Attributes:
        place: the same as `JsonPlaces` has it.
        length: of the place. runs: within a string those of each number of characters; None elsewhere.
        line, stamp: for whoever keeps its mask.
    """

    __slots__ = ("_steps", "length", "line", "place", "runs", "stamp")
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, place: Place, steps: JsonSteps, runs: dict[int, JsonState] | None) -> None:
        super().__init__()
        self.place, self._steps, self.length, self.runs = place, steps, place.length, runs
        self.line = self.stamp = -1

    def __eq__(self, other: object) -> bool:
        return self is other

    def __missing__(self, unit: int) -> JsonState:
        found = self[unit] = self._steps.state_after(self, _text_of(unit))
        return found


class TokenUnits:
    """Tokens in units, and the characters that each adds to a string. Each is found when it is first asked for.

    Args:
        token_bytes: text of each id; no text leads nowhere.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        self._units: list[tuple[int, ...] | None] = [None] * len(token_bytes)
        self._counts: list[int | None] = [None] * len(token_bytes)

    def of(self, token_id: int) -> tuple[int, ...]:
        """A token's bytes, in which spaces that follow one another are one unit."""
        units = self._units[token_id]
        if units is None:
            parts = _UNIT.findall(self.token_bytes[token_id])
            units = tuple(part[0] if len(part) == 1 else _SPACES + len(part) for part in parts)
            self._units[token_id] = units
        return units

    def count(self, token_id: int) -> int:
        """Characters of a token that are all of a string; 0 if it has others, or parts of one."""
        count = self._counts[token_id]
        if count is None:
            try:
                text = self.token_bytes[token_id].decode()
            except UnicodeDecodeError:
                text = ""
            count = self._counts[token_id] = 0 if '"' in text or "\\" in text else len(text)
        return count


class JsonSteps:
    """All places of one schema that rows came to.

    Attributes:
        start: of an empty text.
        places: finds them.
    """

    def __init__(self, places: JsonPlaces, units: TokenUnits) -> None:
        self.places, self._units = places, units
        self._states: dict[Place, JsonState] = {}
        self._runs: dict[Frames, dict[int, JsonState]] = {}
        self._frames: dict[Frames, Frames] = {}
        self._seen_bytes = 0
        self.start = self._state(places.start)

    def after(self, state: JsonState, token_id: int) -> JsonState | None:
        """The state after one more token, which the schema allows; None if it is not known."""
        units = self._units
        try:
            if (runs := state.runs) is not None and (count := units.count(token_id)):
                found = runs.get(state.length + count)
                if found is None:
                    found = runs[state.length + count] = self.state_after(state, units.token_bytes[token_id])
                return found
            before = state
            for unit in units.of(token_id):
                state = state[unit]
        except StepLostError:
            return None
        except IndexError:
            return None
        return None if state is before and not units.token_bytes[token_id] else state

    def state_after(self, state: JsonState, text: bytes) -> JsonState:
        """The state after some more text. Raises StepLostError."""
        place = self.places.after(state.place, text)
        if place is None:
            raise StepLostError
        return self._state(place)

    def _state(self, place: Place) -> JsonState:
        found = self._states.get(place)
        if found is None:
            seen_bytes = self._seen_bytes + len(place.seen)
            if len(self._states) >= _MOST_PLACES or seen_bytes > _MOST_SEEN_BYTES:
                raise StepLostError
            self._seen_bytes = seen_bytes
            frames = self._frames.setdefault(place.frames, place.frames)
            runs = self._runs.setdefault(frames, {}) if self.places.counts_characters(place) else None
            place = place._replace(frames=frames)
            found = self._states[place] = JsonState(place, self, runs)
        return found


def json_steps(schema: str, units: TokenUnits) -> JsonSteps | None:
    """The places of a schema, which is the text of one; None where all its texts count byte by byte."""
    places = JsonPlaces(json.loads(schema))
    return JsonSteps(places, units) if places.are_shared else None


def _text_of(unit: int) -> bytes:
    return bytes((unit,)) if unit < _SPACES else b" " * (unit - _SPACES)
