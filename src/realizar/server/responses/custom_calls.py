"""Custom tools, whose input is plain text: the model sees each as a function with one argument, `input`.

The function is strict, so that a whole call always has its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ARGUMENT = "input"
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {ARGUMENT: {"type": "string"}},
    "required": [ARGUMENT],
    "additionalProperties": False,
}
_LONGEST_ESCAPE = 12  # characters of a surrogate pair


def arguments_of(text: str) -> str:
    """The arguments of a call with a text."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """The text of a call's arguments; of those that were cut off, as much as there is."""
    _, _, rest = arguments.partition(":")
    _, _, written = rest.partition('"')
    for cut in range(_LONGEST_ESCAPE):
        try:
            text, _ = json.JSONDecoder(strict=False).raw_decode(f'"{written[: max(len(written) - cut, 0)]}"')
        except ValueError:
            continue
        return str(text).encode("utf-8", "replace").decode()  # a pair's first half alone is no character
    return ""
