"""Rules of arguments written as in Python, for grammars that force calls. Standard library only.

Values are JSON there, which the parser reads as well as Python's own: both write texts between double quotes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from realizar.tokenizer.parsers.grammar_rules import ANYTHING, json_rule, members, part_of

_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class PythonicRules:
    """The arguments by name, in the schema's order."""

    def rules(self, rule: str, parameters: Mapping[str, Any], strict: bool, literal: Callable[[str], str]) -> list[str]:
        """As of `ArgumentRules`."""
        found = members(parameters, strict)
        if not found:
            if not parameters.get("additionalProperties"):
                return [f'{rule}: ""']
            pair = f'{rule}_pair: {_KEY} "=" {rule}_any'
            return [f'{rule}: ({rule}_pair (", " {rule}_pair)*)?', pair, json_rule(f"{rule}_any", ANYTHING, strict)]
        # `head` writes the first member that is there, `tail` each later one behind a comma.
        written = [f"{rule}: {rule}_head_0"]
        for place, (key, schema, required) in enumerate(found):
            member, last = f"{rule}_member_{place}", place + 1 == len(found)
            tail = "" if last else f" {rule}_tail_{place + 1}"
            other = "" if required else ' | ""' if last else f" | {rule}_head_{place + 1}"
            written.append(json_rule(f"{rule}_{place}_value", part_of(schema, parameters), strict))
            written.append(f"{member}: {literal(key + '=')} {rule}_{place}_value")
            written.append(f"{rule}_head_{place}: {member}{tail}{other}")
            if place:
                comma = f'", " {member}' if required else f'(", " {member})?'
                written.append(f"{rule}_tail_{place}: {comma}{tail}")
        return written
