"""`realizar tokenize`: JSON lines in, JSON lines out, from a vocabulary alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def tokenized(
    realizar: Callable[..., Any], model: Path, folder: Path, texts: list[str], *options: str
) -> list[list[int]]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    result = realizar("tokenize", model, "--input", source, "--output", target, *options)
    assert (result.status, result.stdout, result.stderr) == (0, "", "")
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert all(set(line) == {"tokens"} for line in lines)
    return [line["tokens"] for line in lines]


def test_a_line_in_gives_a_line_out(realizar: Callable[..., Any], vocabulary_only: Path, tmp_path: Path) -> None:
    texts = ["hehe", "", "h\u2028e", "\u00e9"]
    encoded = tokenized(realizar, vocabulary_only, tmp_path, texts)
    assert encoded[0] == [256, 256]
    assert encoded[1] == []
    assert encoded[2] == [104, 0xE2, 0x80, 0xA8, 101]
    assert encoded[3] == [0xC3, 0xA9]


def test_special_texts_are_parsed_by_default(
    realizar: Callable[..., Any], vocabulary_only: Path, tmp_path: Path
) -> None:
    assert tokenized(realizar, vocabulary_only, tmp_path, ["he<|end|>"]) == [[256, 257]]
    plain = tokenized(realizar, vocabulary_only, tmp_path, ["he<|end|>"], "--no-parse-special")
    assert plain == [[256, *b"<|end|>"]]


def test_special_tokens_at_the_ends_can_be_left_out(
    realizar: Callable[..., Any], gemma3_path: Path, tmp_path: Path
) -> None:
    with_bos = tokenized(realizar, gemma3_path, tmp_path, ["hello"])
    without = tokenized(realizar, gemma3_path, tmp_path, ["hello"], "--no-add-special")
    assert with_bos == [[2, *without[0]]]


def test_one_text_from_the_command_line(realizar: Callable[..., Any], vocabulary_only: Path) -> None:
    assert realizar("tokenize", vocabulary_only, "he!").stdout == "256 33\n"
    assert json.loads(realizar("tokenize", vocabulary_only, "he!", "--json").stdout) == {"tokens": [256, 33]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 3}', "no string `text`"),
        ("{}", "no string `text`"),
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"text": "\\ud800"}', "lone surrogate"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named(
    realizar: Callable[..., Any], vocabulary_only: Path, tmp_path: Path, line: str, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    result = realizar("tokenize", vocabulary_only, "--input", source, "--output", tmp_path / "out.jsonl")
    assert result.status == 1
    assert result.stderr.startswith(f"realizar: {source}:3: ")
    assert message in result.stderr


def test_text_and_input_exclude_each_other(realizar: Callable[..., Any], vocabulary_only: Path) -> None:
    assert realizar("tokenize", vocabulary_only).status == 1
    assert realizar("tokenize", vocabulary_only, "a", "--input", "b").status == 1


def test_weights_without_vocabulary_are_refused(realizar: Callable[..., Any], weights_only: Path) -> None:
    result = realizar("tokenize", weights_only, "he")
    assert result.status == 1
    assert len(result.stderr.splitlines()) == 1


def test_an_output_that_would_not_be_written_is_refused(
    realizar: Callable[..., Any], vocabulary_only: Path, tmp_path: Path
) -> None:
    result = realizar("tokenize", vocabulary_only, "he", "--output", tmp_path / "out")
    assert (result.status, result.stdout) == (1, "")
    assert "--input" in result.stderr
