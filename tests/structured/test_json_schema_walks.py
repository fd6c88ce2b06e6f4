"""Whatever a random walk through the grammar of a JSON schema writes is valid under the schema: 200 schemas."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from realizar.sampling_params import StructuredOutput
from structured.grammar_walks import small_factory, walk
from structured.schemas import HANDMADE, random_schema
from wider import wider

jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="the validator comes with schemathesis")

FACTORY = small_factory()
NUM_RANDOM = 200 - len(HANDMADE)


def finite(text: str) -> float:
    """A number beyond what a float holds is a number too; only schemas without bounds let it come to that."""
    value = float(text)
    return value if math.isfinite(value) else 1e300


def check(schema: Any, seeds: range) -> None:
    grammar = FACTORY.compile(StructuredOutput("json_schema", json.dumps(schema)))
    validator = jsonschema_rs.validator_for(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, validate_formats=True
    )
    texts = set()
    for seed in seeds:
        _, text = walk(FACTORY, grammar, np.random.default_rng(seed))
        value = json.loads(text, parse_float=finite)
        errors = [error.message for error in validator.iter_errors(value)]
        assert not errors, f"{text!r} under {json.dumps(schema)}: {errors}"
        texts.add(text)
    assert texts


@pytest.mark.parametrize("name", HANDMADE)
def test_handmade(name: str) -> None:
    check(HANDMADE[name], range(4))


@pytest.mark.parametrize("seed", wider(range(NUM_RANDOM), *range(0, NUM_RANDOM, 4)))
def test_random(seed: int) -> None:
    check(random_schema(np.random.default_rng(seed)), range(2))


def test_there_are_enough() -> None:
    """They are different, and use every keyword that is supported."""
    schemas = [*HANDMADE.values(), *(random_schema(np.random.default_rng(seed)) for seed in range(NUM_RANDOM))]
    texts = {json.dumps(schema) for schema in schemas}
    assert len(texts) >= 190
    together = " ".join(texts)
    for keyword in (
        "type", "properties", "required", "additionalProperties", "patternProperties", "items", "prefixItems",
        "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const", "anyOf", "oneOf", "allOf", "$ref",
        "$defs", "minProperties", "maxProperties",
    ):  # fmt: skip
        assert f'"{keyword}"' in together, keyword
