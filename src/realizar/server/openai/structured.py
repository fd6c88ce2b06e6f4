"""`find_structured` reads `response_format`, or vLLM's fields for constrained output, as a `StructuredOutput`."""

from __future__ import annotations

import json
from typing import Any

from realizar.sampling_params import StructuredOutput
from realizar.server.errors import refused
from realizar.server.openai.records import GenerationFields, ResponseFormat


def find_structured(
    fields: GenerationFields, response_format: ResponseFormat | None
) -> tuple[str, StructuredOutput] | None:
    """Find the constraint on a request's answer, and the field that states it; None if the answer is free.

    Raises:
        ApiError, InvalidRequestError: 400; there are several constraints, or one is malformed.
    """
    found: list[tuple[str, StructuredOutput]] = []
    if response_format is not None and (wanted := _of_format(response_format)) is not None:
        found.append(("response_format", wanted))
    prefix, given = "structured_outputs", fields.structured_outputs
    if given is not None:
        found += _listed(prefix + ".", given.json, given.regex, given.choice, given.grammar)
        if given.json_object:
            found.append((f"{prefix}.json_object", StructuredOutput("json_object", "")))
    found += _listed("guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise refused(f"{names} can't be combined", found[1][0], "invalid_value")
    return found[0] if found else None


def _of_format(given: ResponseFormat) -> StructuredOutput | None:
    if given.type not in ("text", "json_object", "json_schema"):
        raise refused(
            "response_format.type must be text, json_object or json_schema", "response_format.type", "invalid_value"
        )
    path = "response_format.json_schema"
    if given.type != "json_schema" and given.json_schema is not None:
        raise refused(f"{path} needs response_format.type to be json_schema, not {given.type}", path, "invalid_value")
    if given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutput("json_object", "")
    if given.json_schema is None:
        raise refused(f"{path} is missing", path, "missing_required_parameter")
    if given.json_schema.schema is None:
        return StructuredOutput("json_object", "")  # as in OpenAI's API, a missing schema allows any object
    return StructuredOutput("json_schema", json.dumps(given.json_schema.schema))


def _listed(
    prefix: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[tuple[str, StructuredOutput]]:
    found: list[tuple[str, StructuredOutput]] = []
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found.append((f"{prefix}json", StructuredOutput("json_schema", text)))
    if regex is not None:
        found.append((f"{prefix}regex", StructuredOutput("regex", regex)))
    if choice is not None:
        if not choice or any(not text for text in choice):
            raise refused(f"{prefix}choice must hold texts that are not empty", f"{prefix}choice", "invalid_value")
        found.append((f"{prefix}choice", StructuredOutput("choice", json.dumps(choice))))
    if grammar is not None:
        found.append((f"{prefix}grammar", StructuredOutput("lark", grammar)))
    return found
