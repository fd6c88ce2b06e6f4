"""JSON from files of unknown origin: bounded in size and depth, no NaN, no duplicate keys. Standard library only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError

MAX_CONTAINERS = 300_000
MAX_VALUES = 1 << 20
"""Brackets, and commas, that a text may hold: what parsing costs in time and memory hangs on these, not on its size."""


class _RefusedError(ValueError):
    """JSON that Python would take and we do not."""


def parse_json_object(path: Path, data: bytes, base: int = 0) -> dict[str, Any]:
    """Parses an object.

    Args:
        path: file that `data` comes from, and `base` the offset of its first byte there: for messages.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, nested too deep, too many values, NaN or an infinity, a
            duplicate key.
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS or data.count(b",") > MAX_VALUES:
        raise CheckpointError(path, f"offset {base}", "bad JSON: too many values")
    try:
        text = str(data, "utf-8")
        value = json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_refuse_constant, parse_float=_parse_finite
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"offset {base + error.start}", "the JSON is not valid UTF-8") from error
    except json.JSONDecodeError as error:
        offset = base + len(text[: error.pos].encode("utf-8"))
        raise CheckpointError(path, f"offset {offset}", f"bad JSON: {error.msg}") from error
    except RecursionError:
        raise CheckpointError(path, f"offset {base}", "bad JSON: nested too deep") from None
    except ValueError as error:  # A refusal of ours, or an integer of thousands of digits.
        raise CheckpointError(path, f"offset {base}", f"bad JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"offset {base}", "bad JSON: not an object")
    return value


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Reads a file that holds one JSON object of at most `max_bytes` bytes."""
    return parse_json_object(path, read_bounded(path, max_bytes))


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The whole of a regular file.

    Raises:
        CheckpointError: it can't be read, is not a regular file, or is larger than `max_bytes`.
    """
    try:
        if not path.is_file():
            raise CheckpointError(path, "file", "not a regular file")
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(path, "file", f"cannot be opened: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise CheckpointError(path, f"offset {max_bytes}", f"the file is over its limit of {max_bytes} bytes")
    return data


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _RefusedError(f"duplicate key {shown(key)}")
        seen.add(key)
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is not a JSON number")


def _parse_finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {digits[:40]} overflows")
    return value
