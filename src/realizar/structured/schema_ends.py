"""`can_end` checks that a JSON schema has a finite value, as schemas may refer (`$ref`) to themselves. Standard library
only.

Each schema is a node of a graph with conditions: another node, or one of several, must end. The search starts from
nodes without conditions and visits each node once, so the time is linear in the schema's size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any


def can_end(root: Mapping[str, Any]) -> bool:
    """True if a schema has a finite value.

    Only mandatory parts are followed: references, required properties, the items of an array that can't be empty, all
    of `allOf`, and one branch of every `anyOf` and `oneOf`. The compiler checks references that lead out of the schema
    or to nothing.
    """
    return _Graph(root).ends()


class _Graph:
    """The graph of schemas. Nodes are numbered in order of discovery; a condition holds once one of its nodes ends."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._numbers: dict[int, int] = {}
        self._nodes: list[Mapping[str, Any]] = []
        self._open: list[int] = []  # by node: conditions not met yet
        self._waiting: list[list[tuple[int, int]]] = []  # by node: (node, condition) that wait for it
        self._targets: dict[str, Any] = {}

    def ends(self) -> bool:
        """True if the root ends."""
        self._number(self._root)
        done: list[int] = []
        number = 0
        while number < len(self._nodes):  # nodes are added meanwhile
            self._read(number)
            if self._open[number] == 0:
                done.append(number)
            number += 1
        met: set[tuple[int, int]] = set()
        while done:
            for waiting in self._waiting[done.pop()]:
                if waiting not in met:
                    met.add(waiting)
                    self._open[waiting[0]] -= 1
                    if self._open[waiting[0]] == 0:
                        done.append(waiting[0])
        return self._open[0] == 0

    def _read(self, number: int) -> None:
        """Record a node's conditions; schemas that are not objects end at once."""
        for condition, ways in enumerate(self._conditions(self._nodes[number])):
            if all(isinstance(way, dict) for way in ways):
                self._open[number] += 1
                for way in ways:
                    self._waiting[self._number(way)].append((number, condition))

    def _number(self, schema: Mapping[str, Any]) -> int:
        found = self._numbers.get(id(schema))
        if found is None:
            found = self._numbers[id(schema)] = len(self._nodes)
            self._nodes.append(schema)
            self._open.append(0)
            self._waiting.append([])
        return found

    def _conditions(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Lists of schemas; of each list, one must end."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield [self._target(reference)]
        for each in _listed(schema, "allOf"):
            yield [each]
        for keyword in ("anyOf", "oneOf"):
            ways = _listed(schema, keyword)
            if ways:
                yield ways
        if _must_be(schema, "object"):
            yield from ([each] for each in _required(schema))
        if _must_be(schema, "array"):
            yield from ([each] for each in _needed_items(schema))

    def _target(self, reference: str) -> Any:
        """The target of a reference into the schema itself; None for other references."""
        if reference not in self._targets:
            self._targets[reference] = self._resolve(reference)
        return self._targets[reference]

    @functools.cached_property
    def _anchors(self) -> dict[str, Any]:
        """The schemas that have an `$anchor`, by its name."""
        found: dict[str, Any] = {}
        waiting: list[Any] = [self._root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                if isinstance(value.get("$anchor"), str):
                    found[value["$anchor"]] = value
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
        return found

    def _resolve(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return None
        if reference[1:2] not in ("", "/"):
            return self._anchors.get(reference[1:])
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found


def _required(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        yield from (properties.get(name) for name in required if isinstance(name, str))


def _needed_items(schema: Mapping[str, Any]) -> Iterator[Any]:
    least = schema.get("minItems", 0)
    if isinstance(least, int) and least >= 1:
        items = _listed(schema, "prefixItems")[:least]
        yield from items
        if least > len(items):
            yield schema.get("items")


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _must_be(schema: Mapping[str, Any], kind: str) -> bool:
    named = schema.get("type")
    return named == kind or named == [kind]
