"""Options that constrain the answer's structure. cyclopts and the nouns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput

_MOST_CHARACTERS = 16 << 20
"""Limit of a file: longer than any allowed grammar, and far less than the memory."""


@Parameter(name="*", group="Structured output", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOptions:
    r"""Options of structured output: at most one grammar, which the answer follows to its end.

    Attributes:
        json_object: any JSON object.
        json_schema: JSON of this schema; @FILE reads it from a file.
        regex: text that matches all of this expression; \d, \w and \s are digits, letters and spaces of ASCII.
        grammar: text of this Lark grammar, whose \d, \w and \s are of all scripts; @FILE reads it from a file.
        choice: one of some texts; repeat the option for each.
    """

    json_object: bool = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = ()

    def chosen(self) -> StructuredOutput | None:
        """The chosen grammar, or None.

        Raises:
            InvalidRequestError: several are given, one is empty, or a file can't be read.
        """
        given: dict[str, StructuredOutput] = {}
        if self.json_object:
            given["--json-object"] = StructuredOutput("json_object")
        if self.json_schema is not None:
            given["--json-schema"] = StructuredOutput("json_schema", _text("--json-schema", self.json_schema))
        if self.regex is not None:
            given["--regex"] = StructuredOutput("regex", _filled("--regex", self.regex))
        if self.grammar is not None:
            given["--grammar"] = StructuredOutput("lark", _text("--grammar", self.grammar))
        if self.choice:
            choices = [_filled("--choice", choice) for choice in self.choice]
            given["--choice"] = StructuredOutput("choice", json.dumps(choices))
        if len(given) > 1:
            raise InvalidRequestError(f"{', '.join(given)} can't be combined", "structured")
        return next(iter(given.values()), None)


def _filled(option: str, value: str) -> str:
    if not value:
        raise InvalidRequestError(f"{option} is empty", "structured")
    return value


def _text(option: str, value: str) -> str:
    if not value.startswith("@"):
        return _filled(option, value)
    _filled(f"the file's name in {option} @FILE", value[1:])
    path = Path(value[1:])
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", "structured") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 at byte {error.start}", "structured") from error
    if len(text) > _MOST_CHARACTERS:
        raise InvalidRequestError(f"{path} has more than {_MOST_CHARACTERS} characters", "structured")
    return _filled(str(path), text)
