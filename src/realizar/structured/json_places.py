"""`JsonPlaces`: where a text stands in its JSON schema, so that rows at equal places share masks. Standard library.

What may follow in an object whose properties are all described does not depend on the values before: after `"a": 12`
the same may follow as after `"a": 7`. So a place is the path of open objects and arrays with the last key of each, and
of what is being written as much as a schema may look at: of a string that only has lengths the number of its
characters, of all else the bytes. Equal places allow the same; different ones may do so too. A schema of any other
form is taken for one value, of which all bytes are part of the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

_VALUE, _STRING, _BYTES, _FIRST, _KEY, _COLON, _NEXT, _COMMA = range(8)
_SPACE, _ENDS = b" \n\r\t", b",}] \n\r\t"
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_SPACES, _IN_KEY, _IN_STRING = (re.compile(each) for each in (rb"[ \n\r\t]+", rb'[^"\\]+', rb'[^"\\\x80-\xff]+'))
_NOTES = frozenset({"title", "description"})
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"}) | _NOTES
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"}) | _NOTES
_TEXT = frozenset({"type", "minLength", "maxLength"}) | _NOTES


class _Node(NamedTuple):
    """A schema: `kind` is `object`, `array`, `string`, or `bytes` for all others. `most` of -1 is no limit."""

    kind: str
    number: int
    parts: Mapping[bytes, _Node] = {}
    item: _Node | None = None
    least: int = 0
    most: int = -1


Frames: TypeAlias = tuple[tuple[int, bytes | int], ...]


class Place(NamedTuple):
    """A place in a text.

    Attributes:
        frames: the open objects and arrays: the number of the schema, and the last key, or the number of items.
        mode: what is being written.
        seen: the bytes of it that count; of a string those of a character that is not complete, or all.
        length: characters of a string; of other values the objects and arrays that are open in them.
        inside: of a value by its bytes: 1 within a string, 2 after a backslash there; of a string so too, once it has a
            backslash: from there to its end its characters are not counted.
    """

    frames: Frames
    mode: int
    seen: bytes = b""
    length: int = 0
    inside: int = 0

    @property
    def is_known(self) -> bool:
        """False within a string whose characters are not counted: another mask may belong to an equal place."""
        return self.mode != _STRING or not self.inside


class JsonPlaces:
    """The places of texts of one schema.

    Attributes:
        start: of an empty text.
        are_shared: False if all texts are one value by its bytes, so that different texts are at different places.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._nodes: list[_Node] = []
        self._root = self._read(schema)
        self.start = Place((), _VALUE)
        self.are_shared = self._root.kind != "bytes"

    def after(self, place: Place, text: bytes) -> Place | None:
        """The place after some more text, of which the schema allows all; None if it can't be told."""
        found: Place | None = place
        at = 0
        while found is not None and at < len(text):
            run = _run_of(found, text, at)
            if run is None:
                found, at = self._step(found, text[at]), at + 1
            elif found.mode == _STRING:
                counted = self._counted(self._value_node(found.frames), found.length + len(run[0]))
                found, at = Place(found.frames, _STRING, length=counted), run.end()
            else:
                found, at = Place(found.frames, found.mode, found.seen + run[0]), run.end()
        return found

    def most_characters(self, place: Place) -> int:
        """Characters at the most of the string that is being written; -1 if none is, or if it has no bound."""
        if not self.counts_characters(place):
            return -1
        node = self._value_node(place.frames)
        return -1 if node is None else node.most

    @staticmethod
    def counts_characters(place: Place) -> bool:
        """True between two characters of a string that are counted."""
        return place.mode == _STRING and not place.inside and not place.seen

    def _read(self, schema: object) -> _Node:
        number = len(self._nodes)
        node = _Node("bytes", number)
        self._nodes.append(node)
        if not isinstance(schema, dict):
            return node
        kind, keywords = schema.get("type"), schema.keys()
        properties, items = schema.get("properties"), schema.get("items")
        if kind == "string" and keywords <= _TEXT:
            node = _Node("string", number, least=schema.get("minLength", 0), most=schema.get("maxLength", -1))
        elif kind == "array" and keywords <= _ARRAY and isinstance(items, dict):
            node = _Node("array", number, item=self._read(items))
        elif kind == "object" and keywords <= _OBJECT and isinstance(properties, dict) and _is_closed(schema):
            node = _Node("object", number, {key.encode(): self._read(each) for key, each in properties.items()})
        self._nodes[number] = node
        return node

    def _value_node(self, frames: Frames) -> _Node | None:
        """The schema of the value that is due; None if the text is none of the schema's."""
        if not frames:
            return self._root
        number, last = frames[-1]
        node = self._nodes[number]
        return node.item if isinstance(last, int) else node.parts.get(last)

    @staticmethod
    def _counted(node: _Node | None, count: int) -> int:
        """Characters of a string, as far as its schema tells them apart."""
        return count if node is None or node.most >= 0 else min(count, node.least)

    def _step(self, place: Place, byte: int) -> Place | None:
        mode = place.mode
        if mode == _STRING:
            return self._in_string(place, byte)
        if mode == _BYTES:
            return self._in_bytes(place, byte)
        if mode == _KEY:  # its other bytes are a run
            number = place.frames[-1][0]
            return Place((*place.frames[:-1], (number, place.seen)), _COLON) if byte == _QUOTE else None
        if mode == _VALUE:
            return self._begin(place.frames, byte)
        if mode == _COLON:
            return Place(place.frames, _VALUE) if byte == ord(":") else None
        return self._between(place, byte)

    def _begin(self, frames: Frames, byte: int) -> Place | None:
        """A value begins."""
        node = self._value_node(frames)
        if node is None:
            return None
        if node.kind == "object" and byte == ord("{"):
            return Place((*frames, (node.number, b"")), _FIRST)
        if node.kind == "array" and byte == ord("["):
            return Place((*frames, (node.number, 0)), _FIRST)
        if node.kind == "string" and byte == _QUOTE:
            return Place(frames, _STRING)
        if node.kind != "bytes" or byte == ord("]"):
            return None
        return self._in_bytes(Place(frames, _BYTES), byte)

    def _between(self, place: Place, byte: int) -> Place | None:
        """Something of an object or array that is no value."""
        frames, mode = place.frames, place.mode
        if not frames:
            return None
        number, last = frames[-1]
        if isinstance(last, int):
            if byte == ord("]"):
                return Place(frames[:-1], _NEXT)
            if mode == _FIRST:
                return self._begin(frames, byte)
            return Place((*frames[:-1], (number, last + 1)), _VALUE) if byte == ord(",") else None
        if byte == ord("}") and mode != _COMMA:
            return Place(frames[:-1], _NEXT)
        if byte == _QUOTE and mode != _NEXT:
            return Place(frames, _KEY)
        return Place(frames, _COMMA) if byte == ord(",") and mode == _NEXT else None

    def _in_string(self, place: Place, byte: int) -> Place | None:
        """One more byte of a string, of which characters are counted up to the first backslash."""
        if byte == _QUOTE and place.inside < 2:
            return Place(place.frames, _NEXT)
        if place.inside or byte == _BACKSLASH:
            return Place(place.frames, _STRING, inside=2 if byte == _BACKSLASH and place.inside < 2 else 1)
        seen = place.seen + bytes((byte,))
        if len(seen) < _length_of(seen[0]):
            return place._replace(seen=seen)
        return place._replace(seen=b"", length=self._counted(self._value_node(place.frames), place.length + 1))

    def _in_bytes(self, place: Place, byte: int) -> Place | None:
        """One more byte of a value whose bytes all count."""
        seen, depth = place.seen + bytes((byte,)), place.length
        if place.inside:
            if byte == _QUOTE and place.inside == 1:
                return Place(place.frames, _NEXT) if not depth else place._replace(seen=seen, inside=0)
            return place._replace(seen=seen, inside=2 if byte == _BACKSLASH and place.inside == 1 else 1)
        if not depth and place.seen and byte in _ENDS:  # a number or a name
            ended = Place(place.frames, _NEXT)
            return ended._replace(seen=bytes((byte,))) if byte in _SPACE else self._between(ended, byte)
        if byte == _QUOTE:
            return place._replace(seen=seen, inside=1)
        if byte in b"{[":
            return place._replace(seen=seen, length=depth + 1)
        if byte in b"}]":
            return Place(place.frames, _NEXT) if depth == 1 else place._replace(seen=seen, length=depth - 1)
        return place._replace(seen=seen)


def _run_of(place: Place, text: bytes, at: int) -> re.Match[bytes] | None:
    """Bytes from a place on that do not change what is being written: taken together they cost what one does."""
    if place.mode == _KEY:
        return _IN_KEY.match(text, at)
    if place.mode == _STRING:
        return None if place.inside or place.seen else _IN_STRING.match(text, at)
    return None if place.mode == _BYTES else _SPACES.match(text, at)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """True if an object has no other properties than those described, and their names are plain."""
    required = schema.get("required", [])
    if schema.get("additionalProperties") is not False or not isinstance(required, list):
        return False
    names = schema["properties"].keys()
    return all(name in names for name in required) and all(name and not {*name} & {"\\", '"'} for name in names)


def _length_of(first: int) -> int:
    """Bytes of a character of UTF-8, by its first."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
