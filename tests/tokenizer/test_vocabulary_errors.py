"""Malformed vocabularies are refused by name; missing ones too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, InvalidRequestError, TokenizerError
from realizar.tokenizer.load import load_tokenizer

PATH = Path("made-up.gguf")
GOOD: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.token_type": np.array([1, 1, 1, 3], np.int32),
    "tokenizer.ggml.merges": ["a b"],
}
SCORED: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
    "tokenizer.ggml.scores": np.array([0, 0, 0, -1], np.float32),
    "tokenizer.ggml.token_type": np.array([2, 3, 3, 1], np.int32),
}


def load(metadata: dict[str, Any]) -> Any:
    return load_tokenizer(Checkpoint(PATH, "gguf", metadata, {}))


def test_the_good_ones_load() -> None:
    assert load(GOOD).encode("abab<s>") == [2, 2, 3]
    assert load(SCORED).encode("a", add_special=False) == [0, 3], "the prefixed space is unknown"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "has no vocabulary"),
        ({"tokenizer.ggml.model": "no_vocab"}, "has no vocabulary"),
        ({"tokenizer.ggml.model": "none"}, "has no vocabulary"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "has no vocabulary"),
        ({"tokenizer.ggml.merges": None}, "has no merges"),
        ({"tokenizer.ggml.pre": "gpt-5"}, "unknown pre-tokenizer 'gpt-5'"),
        ({"tokenizer.ggml.add_bos_token": True}, "file asks for a BOS token and names none"),
        ({"tokenizer.ggml.add_eos_token": True}, "file asks for an EOS token and names none"),
    ],
)
def test_no_vocabulary(change: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(TokenizerError, match=f"made-up.gguf.*{message}"):
        load(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", ["a", "b", "a", "<s>"], "token 'a' appears twice"),
        ("tokens", [], "not a list of strings"),
        ("tokens", np.zeros(4), "not a list of strings"),
        ("token_type", np.array([1, 1], np.int32), "2 entries for 4 tokens"),
        ("token_type", ["x"], "not a list of numbers"),
        ("token_type", np.array([1, 1, 99, 3], np.int32), "token 2 is of type 99, which is unknown"),
        ("token_type", np.array([1, -1, 1, 3], np.int64), "token 1 is of type -1, which is unknown"),
        ("token_type", np.array([1, 1, 1, (1 << 32) + 3], np.uint64), "token 3 is of type 4294967299"),
        ("token_type", np.array([1, 1, 1.5, 3], np.float32), "token 2 is of type 1.5"),
        ("tokens", ["a", "b", "ab", "<" * 257], "special token 3 has 257 characters, above 256"),
        ("scores", np.zeros(5, np.float32), "5 entries for 4 tokens"),
        ("scores", np.array([0, np.nan, 0, 0], np.float32), "holds NaN"),
        ("merges", ["a c"], "names no token"),
        ("merges", ["b a"], "names no token"),
        ("merges", ["ab"], "is not a pair"),
        ("merges", 3, "not a list of strings"),
        ("bos_token_id", 4, "is 4, beyond the 4 tokens"),
        ("eos_token_id", -1, "is -1, beyond the 4 tokens"),
        ("eot_token_id", "x", "not an id"),
        ("unknown_token_id", True, "not an id"),
        ("add_bos_token", 1, "neither true nor false"),
        ("pre", 7, "is not text"),
    ],
)
def test_malformed(key: str, value: Any, message: str) -> None:
    name = f"tokenizer.ggml.{key}"
    with pytest.raises(CheckpointError, match=message) as caught:
        load({**GOOD, name: value})
    assert str(caught.value).startswith("made-up.gguf: key 'tokenizer.ggml.")
    assert key == "tokens" or name in str(caught.value)


@pytest.mark.parametrize(
    ("role", "value"),
    [
        ("padding", 4),
        ("mask", 4),
        ("unknown", 4),
        *((role, (1 << 32) - 1) for role in ("padding", "bos", "eos", "eot")),
    ],
)
def test_ids_beyond_the_vocabulary_that_no_answer_needs(
    role: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"tokenizer.ggml.{role}_token_id"
    tokenizer = load({**GOOD, key: value})
    assert tokenizer.encode("ab") == load(GOOD).encode("ab")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_texts) == (None, None, {})
    assert caplog.messages == [f"made-up.gguf: key '{key}' is {value}, beyond the 4 tokens; it is left out"]


def test_an_unknown_token_beyond_the_vocabulary_is_the_default_one() -> None:
    assert load({**SCORED, "tokenizer.ggml.unknown_token_id": 4}).encode("a", add_special=False) == [0, 3]


def test_scores_that_float32_lacks_have_a_rank() -> None:
    scores = np.array([0, 0, -1e300, 1e300])
    assert load({**SCORED, "tokenizer.ggml.scores": scores}).encode("a", add_special=False) == [0, 3]


def test_malformed_charsmap() -> None:
    unigram = {**SCORED, "tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": np.zeros(3, np.uint8)}
    with pytest.raises(CheckpointError, match="precompiled_charsmap"):
        load(unigram)
    with pytest.raises(CheckpointError, match="not a list of bytes"):
        load({**unigram, "tokenizer.ggml.precompiled_charsmap": ["x"]})


def test_a_file_without_pre_is_default() -> None:
    assert load({key: value for key, value in GOOD.items() if not key.endswith(".pre")}).encode("ab") == [2]


def test_no_bos_where_only_the_kind_of_model_wants_one() -> None:
    tokenizer = load({**GOOD, "tokenizer.ggml.pre": "llama-bpe"})
    assert not tokenizer.add_bos
    assert tokenizer.encode("ab") == [2]
    named = load({**GOOD, "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 3})
    assert named.encode("ab") == [3, 2]
    assert named.encode("ab", add_special=False) == [2]
    refused = {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.add_bos_token": False}
    assert load({**GOOD, "tokenizer.ggml.pre": "llama-bpe", **refused}).encode("ab") == [2]


def test_empty_tokens_get_names() -> None:
    tokenizer = load({**GOOD, "tokenizer.ggml.tokens": ["a", "b", "ab", ""]})
    assert tokenizer.token_text(3) == "[EMPTY_3]"


def test_first_of_equal_merges_counts() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc"],
        "tokenizer.ggml.merges": ["a b", "b c", "a b"],
    }
    assert load(metadata).encode("abc") == [3, 2]


def test_bytes_or_unknown_are_needed() -> None:
    tokens = ["a", "b"]
    with pytest.raises(TokenizerError, match="needs an unknown token"):
        load({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens})
    with pytest.raises(TokenizerError, match="needs an unknown token"):
        load({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": tokens})


@pytest.mark.parametrize(
    ("model", "tokens", "message"),
    [
        ("gpt2", ["a", "x" * 1025], "token 1 has 1025 characters, above 1024"),
        ("gpt2", [f"{index:01000}" for index in range(6400)], "its tokens have 6400000 characters, above 6291456"),
        ("t5", [f"{index:01000}" for index in range(2200)], "its tokens have 2200000 characters, above 2097152"),
    ],
)
def test_tokens_without_end_are_refused(model: str, tokens: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"key 'tokenizer\.ggml\.tokens': {message}"):
        load({"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []})


def test_a_panic_while_a_gguf_vocabulary_is_read_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A charsmap with a trie that points outside itself, were it not looked at before."""
    wild = np.frombuffer((8).to_bytes(4, "little") + b"\0\xff\xff\xff" * 2 + b"x\0", np.uint8)
    metadata = {**SCORED, "tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": wild}
    with pytest.raises(CheckpointError, match="precompiled_charsmap': is malformed: its trie points outside itself"):
        load(metadata)
    monkeypatch.setattr("realizar.tokenizer.vocabulary.longest_replacement", lambda _: 1)
    with pytest.raises(InvalidRequestError, match="the tokenizer fails on this text: index out of bounds"):
        load(metadata).encode("a")
