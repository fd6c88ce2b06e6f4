"""`realizar run` with a grammar that the answer follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
WORDS = ("--temperature", "1.5", "--seed", "1", "--max-tokens", "40", "--quiet")


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (("--choice", "rouge", "--choice", "bleu"), ("rouge", "bleu")),
        (("--regex", "(ja|nein)"), ("ja", "nein")),
        (("--grammar", 'start: "oui" | "non"'), ("oui", "non")),
    ],
)
def test_the_answer_is_what_the_grammar_allows(
    realizar: Callable[..., Any], smollm2_path: Path, words: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    result = realizar("run", smollm2_path, "Which one?", *words, *WORDS)
    assert result.status == 0, result.stderr
    assert result.stdout.strip() in allowed


def test_a_schema_from_a_file(realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    result = realizar("run", smollm2_path, "A number?", "--json-schema", f"@{path}", *WORDS)
    assert json.loads(result.stdout)["n"] <= 99


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json-object", "--regex", "a+"), "--json-object, --regex can't be combined"),
        (("--regex", ""), "--regex is empty"),
        (("--regex", "(a"), "regex"),
        (("--json-schema", "{"), "schema"),
        (("--json-schema", "@/nowhere.json"), "/nowhere.json"),
        (("--grammar", "start: nothing"), "nothing"),
    ],
)
def test_what_is_no_grammar_is_refused(
    realizar: Callable[..., Any], smollm2_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = realizar("run", smollm2_path, "hello", *words, "--max-tokens", "2")
    assert result.status == 1
    assert len(result.error_lines) == 1
    assert message in result.error_lines[0]


def test_what_holds_no_grammar_is_named(realizar: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"ab\xff")
    for words, message in (
        (("--json-schema", f"@{tmp_path}/nonesuch"), f"{tmp_path}/nonesuch: No such file or directory"),
        (("--grammar", f"@{tmp_path}"), f"{tmp_path}: Is a directory"),
        (("--grammar", f"@{tmp_path}/empty"), f"{tmp_path}/empty is empty"),
        (("--grammar", f"@{tmp_path}/binary"), f"{tmp_path}/binary is not UTF-8 at byte 2"),
        (("--json-schema", "@/dev/zero"), "/dev/zero has more than 16777216 characters"),
        (("--json-schema", "@"), "the file's name in --json-schema @FILE is empty"),
        (("--grammar", ""), "--grammar is empty"),
        (("--regex", ""), "--regex is empty"),
        (("--choice", "a", "--choice", ""), "--choice is empty"),
    ):
        result = realizar("run", "nonesuch.gguf", "hello", *words)
        assert (result.status, result.stderr) == (1, f"realizar: {message}\n")
