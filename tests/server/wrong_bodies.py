"""Bodies of requests that are wrong in one place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def nested(depth: int) -> Any:
    """A text in so many lists, one inside the other."""
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a body, by keys and places."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths_of(value[key], (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of a body with another value at a path."""
    made = copy.deepcopy(body)
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made
