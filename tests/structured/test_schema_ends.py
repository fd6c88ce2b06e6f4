"""Schemas without a finite value are found as by a fixed point in rounds, with bounded work."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from realizar.structured.json_schema import can_end


class Counted(dict[str, Any]):
    """An object that counts how often any is looked into."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.looks += 1
        return super().get(key, default)


def looks(schema: dict[str, Any]) -> int:
    counted = json.loads(json.dumps(schema), object_pairs_hook=Counted)
    Counted.looks = 0
    can_end(counted)
    return Counted.looks


def chain(length: int) -> dict[str, Any]:
    """Each definition needs the next one; the last is a string."""
    needs = {
        f"d{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["n"]}
        for i in range(length)
    }
    return {"$defs": {**needs, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def bound_to_nothing(length: int) -> dict[str, Any]:
    """All definitions need themselves, by way of a large object that all refer to."""
    whole = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(length)}
    needs = {f"d{i}": {"$ref": "#/$defs/all"} for i in range(length)}
    return {
        "$defs": {**needs, "all": {"type": "object", "properties": whole, "required": list(whole)}},
        "$ref": "#/$defs/all",
    }


def shuffled_chain(length: int) -> dict[str, Any]:
    found = chain(length)
    definitions = list(found["$defs"].items())
    random.Random(1).shuffle(definitions)
    return {**found, "$defs": dict(definitions)}


def ways(length: int) -> dict[str, Any]:
    """Every definition is one of all the others."""
    names = [{"$ref": f"#/$defs/d{i}"} for i in range(length)]
    return {"$defs": {f"d{i}": {"allOf": [names[i - 1]]} for i in range(length)}, "anyOf": names}


@pytest.mark.parametrize("make", [chain, bound_to_nothing, shuffled_chain, ways])
def test_the_work_grows_with_the_schema(make: Any) -> None:
    """Twice the schema is twice the work; it was four times."""
    assert looks(make(2000)) < 2.5 * looks(make(1000))


def by_rounds(root: dict[str, Any]) -> bool:
    """The least fixed point, by looking at every definition until nothing changes."""
    found: set[str] = set()

    def ends(schema: Any) -> bool:
        reference = schema.get("$ref")
        needed = schema.get("properties", {}) if schema.get("type") == "object" else {}
        items = (
            [schema["items"]] if schema.get("type") == "array" and schema.get("minItems") and "items" in schema else []
        )
        return (
            (reference is None or reference.rpartition("/")[2] in found)
            and all(map(ends, schema.get("allOf", ())))
            and ("anyOf" not in schema or any(map(ends, schema["anyOf"])))
            and all(ends(needed[name]) for name in schema.get("required", ()) if name in needed)
            and all(map(ends, items))
        )

    while True:
        more = {name for name, each in root["$defs"].items() if ends(each)}
        if more == found:
            return ends(root)
        found = more


def random_schema(rng: random.Random, names: list[str], depth: int) -> dict[str, Any]:
    def another() -> dict[str, Any]:
        return random_schema(rng, names, depth - 1)

    kind = rng.randrange(6) if depth else 5
    if kind == 0:
        return {"allOf": [another() for _ in range(rng.randint(1, 2))]}
    if kind == 1:
        return {"anyOf": [another() for _ in range(rng.randint(1, 3))]}
    if kind == 2:
        return {
            "type": "object",
            "properties": {"a": another(), "b": another()},
            "required": rng.choice([["a"], ["a", "b"], []]),
        }
    if kind == 3:
        return {"type": "array", "items": another(), "minItems": rng.randint(0, 1)}
    return {"$ref": "#/$defs/" + rng.choice(names)} if rng.random() < 0.8 else {"type": "string"}


def test_against_a_fixed_point_by_rounds() -> None:
    rng = random.Random(7)
    seen = {True: 0, False: 0}
    for _ in range(400):
        names = [f"d{i}" for i in range(rng.randint(1, 6))]
        root = {**random_schema(rng, names, 2), "$defs": {name: random_schema(rng, names, 3) for name in names}}
        assert can_end(root) == by_rounds(root), json.dumps(root)
        seen[can_end(root)] += 1
    assert min(seen.values()) > 40


def test_odd_references_are_left_to_the_compiler() -> None:
    for reference in ("https://example.com", "#/nowhere", "#/$defs/list/0", 5, "#"):
        assert can_end({"$defs": {"list": [{}]}, "properties": {"a": {"$ref": reference}}})
    assert not can_end({"$ref": "#"})
    assert can_end({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}})
    assert not can_end({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}})
