"""Names of the kinds of structured output in messages."""

from __future__ import annotations

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput

_NAMES = {"json_schema": "JSON schema", "lark": "Lark grammar", "regex": "regular expression"}


def refusal(structured: StructuredOutput, reason: str) -> InvalidRequestError:
    """The error of a refused grammar; `reason` is one line."""
    kind = _NAMES.get(structured.kind, structured.kind)
    return InvalidRequestError(f"the {kind} can't be honoured: {reason}", "structured")
