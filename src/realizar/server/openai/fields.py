"""The fields that chat and completions share: sampling, constraints of the answer, and those without effect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import msgspec

from realizar.sampling_params import StructuredKind, StructuredOutput
from realizar.server.errors import refused, unsupported
from realizar.server.generation.sampling import PLAIN_FIELDS, SamplingWishes
from realizar.server.openai.records import GenerationFields, ResponseFormat


def read_wishes(
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: StructuredOutput | None,
) -> SamplingWishes:
    """Read the sampling fields of a request; `max_tokens` of None is the model's default.

    Raises ApiError: 400; `best_of` asks for answers that are thrown away.
    """
    if fields.best_of is not None and fields.best_of != (1 if fields.n is None else fields.n):
        raise unsupported("best_of", "must equal n: no further answers are generated")
    plain = {name: value for name in PLAIN_FIELDS if (value := getattr(fields, name)) is not None}
    return SamplingWishes(
        plain=plain if max_tokens is None else {**plain, "max_tokens": max_tokens},
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        logit_bias=fields.logit_bias,
        dry_sequence_breakers=fields.dry_sequence_breakers,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured,
    )


def check_stream(fields: GenerationFields, instead: str = "") -> None:
    """Raise ApiError (400) for fields that do not go with a stream, or only with one."""
    if fields.stream_options is not None and not fields.stream:
        raise refused("stream_options needs stream to be true", "stream_options", "invalid_value")
    if fields.stream and fields.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", f"can't be combined with stream{instead}")


# `find_structured` reads `response_format`, or vLLM's fields for constrained output, as a `StructuredOutput`.


def find_structured(
    fields: GenerationFields, response_format: ResponseFormat | None
) -> tuple[str, StructuredOutput] | None:
    """Find the constraint on a request's answer, and the field that states it; None if the answer is free.

    Raises ApiError or InvalidRequestError: 400; there are several constraints, or one is malformed.
    """
    found: list[tuple[str, StructuredOutput]] = []
    if response_format is not None and (wanted := _of_format(response_format)) is not None:
        found.append(("response_format", wanted))
    found += _listed(fields.structured_outputs, "", "structured_outputs.")
    found += _listed(fields, "guided_", "guided_")
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
    if given.type == "json_schema" and given.json_schema is None:
        raise refused(f"{path} is missing", path, "missing_required_parameter")
    if given.json_schema is None or given.json_schema.schema is None:
        return StructuredOutput("json_object", "")  # as in OpenAI's API, a missing schema allows any object
    return StructuredOutput("json_schema", json.dumps(given.json_schema.schema))


CONSTRAINTS: Mapping[str, StructuredKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
}
"""Kinds of constraints by vLLM's names of them; the older fields begin with `guided_`."""


def _listed(given: msgspec.Struct | None, before: str, path: str) -> Iterator[tuple[str, StructuredOutput]]:
    """The constraints in a record's fields. Args: before, path: what their names begin with there, and in errors."""
    for name, kind in CONSTRAINTS.items():
        value = getattr(given, before + name, None)
        if value is None or (value is False and name == "json_object"):
            continue
        if name == "choice" and (not value or not all(value)):
            raise refused(f"{path}choice must hold texts that are not empty", f"{path}choice", "invalid_value")
        text = value if isinstance(value, str) else json.dumps(value)
        yield f"{path}{name}", StructuredOutput(kind, "" if name == "json_object" else text)
