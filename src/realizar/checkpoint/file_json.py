"""JSON objects from files of unknown origin, bounded in size; errors name the offset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realizar.errors import CheckpointError
from realizar.strict_json import StrictJSONError, is_too_large, parse_strictly

MAX_CONTAINERS = 300_000
MAX_VALUES = 1 << 20
"""Bounds on the brackets and commas of a file."""


def parse_json_object(path: Path, data: bytes, base: int = 0) -> dict[str, Any]:
    """Parse an object; `base` is the offset of its first byte in the file, for messages.

    Raises CheckpointError: not UTF-8, not JSON, not an object, nested too deep, too many values, NaN or an infinity, or
    a duplicate key.
    """
    if is_too_large(data, MAX_CONTAINERS, MAX_VALUES):
        raise CheckpointError(path, f"offset {base}", "bad JSON: it has too many values")
    try:
        text = str(data, "utf-8")
        value = parse_strictly(text)
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"offset {base + error.start}", "the JSON is not valid UTF-8") from error
    except StrictJSONError as error:
        offset = base + len(text[: error.position or 0].encode("utf-8"))
        raise CheckpointError(path, f"offset {offset}", f"bad JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, f"offset {base}", "bad JSON: not an object")
    return value


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    return parse_json_object(path, read_bounded(path, max_bytes))


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """A regular file; CheckpointError where it can't be read, is none, or is larger than `max_bytes`."""
    try:
        if not path.is_file():
            raise CheckpointError(path, "file", "not a regular file")
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(path, "file", f"cannot be opened: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise CheckpointError(path, f"offset {max_bytes}", f"the file exceeds its limit of {max_bytes} bytes")
    return data
