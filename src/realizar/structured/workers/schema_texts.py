"""`SchemaTexts`: schemas whose texts the engine's process follows by their places. Standard library only."""

from __future__ import annotations

import weakref

from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.json_steps import JsonSteps, TokenUnits, json_steps

_MOST_SCHEMAS = 32  # at a time
_MOST_CHARACTERS = 64 << 10  # of a schema, which is read within a step


class SchemaTexts:
    """Makes the `JsonSteps` of schemas that have been compiled.

    Args:
        tokens: those that end a text, and special ones, lead nowhere.
    """

    def __init__(self, tokens: GrammarTokens) -> None:
        token_bytes = list(tokens.token_bytes[: tokens.vocab_size])
        for index in {*tokens.special_ids, *tokens.ends}:
            if index < len(token_bytes):
                token_bytes[index] = b""
        self._units = TokenUnits(token_bytes)
        self._made: weakref.WeakSet[JsonSteps] = weakref.WeakSet()

    def steps(self, structured: StructuredOutput) -> JsonSteps | None:
        """The places of a grammar's texts; None where it has none, is large, or too many are in use."""
        is_schema = structured.kind == "json_schema" and len(structured.value) <= _MOST_CHARACTERS
        if not is_schema or len(self._made) >= _MOST_SCHEMAS:
            return None
        made = json_steps(structured.value, self._units)
        if made is not None:
            self._made.add(made)
        return made
