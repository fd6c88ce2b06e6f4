"""The key-value section of a GGUF file. numpy.

Source of the layout: the GGUF specification (`docs/gguf.md` of ggml), versions 2 and 3.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Self

import numpy as np

from realizar.checkpoint.gguf_cursor import Cursor
from realizar.checkpoint.naming import shown

MAX_KEY_LENGTH = 65535
MAX_ARRAY_DEPTH = 2
_SMALLEST_PAIR = 8 + 1 + 4 + 1
_SMALLEST_STRING = 8
_SMALLEST_ARRAY = 4 + 8


class ValueType(IntEnum):
    """A type of values; `layout` is that of a scalar, and empty of the others. A bool is a byte that must be 0 or 1."""

    layout: struct.Struct

    def __new__(cls, number: int, layout: str = "") -> Self:
        member = int.__new__(cls, number)
        member._value_, member.layout = number, struct.Struct(f"<{layout}")
        return member

    UINT8 = 0, "B"
    INT8 = 1, "b"
    UINT16 = 2, "H"
    INT16 = 3, "h"
    UINT32 = 4, "I"
    INT32 = 5, "i"
    FLOAT32 = 6, "f"
    BOOL = 7, "B"
    STRING = 8
    ARRAY = 9
    UINT64 = 10, "Q"
    INT64 = 11, "q"
    FLOAT64 = 12, "d"

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(self.layout.format)


def read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Any], dict[str, ValueType]]:
    """Reads `count` pairs.

    Returns:
        Values by key (int, float, bool, str; numpy arrays for arrays of numbers and bools; lists for arrays of strings
            and of arrays) and the type of each.

    Raises:
        CheckpointError: empty, over-long or duplicate key, unknown type, bad UTF-8, or anything past the end.
    """
    values: dict[str, Any] = {}
    types: dict[str, ValueType] = {}
    for index in range(count):
        offset, cursor.place = cursor.position, f"pair {index}"
        key = cursor.string("key")
        if not key:
            raise cursor.error(offset, "the key is empty")
        if len(key) > MAX_KEY_LENGTH:
            raise cursor.error(offset, f"a key of {len(key)} characters; at most {MAX_KEY_LENGTH} are allowed")
        if key in values:
            raise cursor.error(offset, f"duplicate key {shown(key)}")
        cursor.place = f"key {shown(key)}"
        types[key] = kind = _value_type(cursor)
        values[key] = _read_array(cursor, 1) if kind is ValueType.ARRAY else _read_scalar(cursor, kind)
    cursor.place = ""
    return values, types


def count_pairs(cursor: Cursor) -> int:
    return cursor.count("metadata pairs", _SMALLEST_PAIR)


def _value_type(cursor: Cursor) -> ValueType:
    offset = cursor.position
    number = cursor.u32("value type")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.error(offset, f"unknown value type {number}") from None


def _read_scalar(cursor: Cursor, kind: ValueType) -> int | float | bool | str:
    if kind is ValueType.STRING:
        return cursor.string("string")
    offset = cursor.position
    value = cursor.unpack(kind.layout, f"{kind.name.lower()} value")[0]
    if kind is ValueType.BOOL:
        if value not in (0, 1):
            raise cursor.error(offset, f"a bool of {value}; only 0 and 1 are valid")
        return bool(value)
    return value


def _read_array(cursor: Cursor, depth: int) -> Any:
    offset = cursor.position
    kind = _value_type(cursor)
    if kind is ValueType.ARRAY:
        if depth == MAX_ARRAY_DEPTH:
            raise cursor.error(offset, f"arrays nested more than {MAX_ARRAY_DEPTH} deep")
        count = cursor.count("inner arrays", _SMALLEST_ARRAY)
        cursor.spend(count)
        return [_read_array(cursor, depth + 1) for _ in range(count)]
    if kind is ValueType.STRING:
        return cursor.strings(cursor.count("strings of an array", _SMALLEST_STRING))
    count = cursor.count(f"{kind.name.lower()} values of an array", kind.layout.size)
    offset = cursor.position
    numbers = cursor.numbers(kind.dtype, count)
    if kind is ValueType.BOOL:
        if (numbers.view(np.uint8) > 1).any():
            raise cursor.error(offset, "a bool that is neither 0 nor 1 in the array")
        return numbers.view(np.bool_)
    return numbers
