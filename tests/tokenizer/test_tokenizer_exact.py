"""Token ids against those that others recorded: the models' own tokenizers, and llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.pre_tokenizers import pre_tokenizer
from realizar.tokenizer.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
NAMES = ("deepseek-coder", "gemma-4", "gpt-2", "llama-bpe", "phi-3", "qwen2", "starcoder")
SEPARATOR = "\n__ggml_vocab_test__\n"

TokenizerOf = Callable[[str], Tokenizer]


@pytest.mark.parametrize("name", [*NAMES, "bert-bge"])
def test_every_line(name: str, tokenizer_of: TokenizerOf) -> None:
    with (DATA / f"{name}.inp").open(encoding="utf-8", newline="") as stream:
        texts = stream.read().removesuffix(SEPARATOR).split(SEPARATOR)
    lines = (DATA / f"{name}.out").read_text(encoding="utf-8").splitlines()
    expected = [[int(number) for number in line.split()] for line in lines]
    assert len(texts) == len(expected) > 40
    tokenizer = tokenizer_of(name)
    assert [tokenizer.encode(text, add_special=False, parse_special=False) for text in texts] == expected


@pytest.mark.parametrize("name", NAMES)
def test_like_llama_cpp(name: str, tokenizer_of: TokenizerOf, recorded: dict[str, Any]) -> None:
    tokenizer, expected = tokenizer_of(name), recorded["vocabularies"][name]
    assert sorted(tokenizer.eos_ids) == expected["eog"]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (expected["bos"], expected["eos"])
    assert (tokenizer.add_bos, tokenizer.add_eos) == (expected["add_bos"], expected["add_eos"])
    for text, plain, special in zip(recorded["texts"], expected["plain"], expected["special"], strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == plain, text
        assert tokenizer.encode(text) == special, text


@pytest.mark.parametrize("name", NAMES)
def test_decode_gives_the_text_back(name: str, tokenizer_of: TokenizerOf, recorded: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(name)
    for text in recorded["texts"]:
        if name in ("phi-3", "gemma-4") and "▁" in text:
            continue  # such vocabularies write a space with this character
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids, skip_special=False, remove_space_prefix=True) == text


# llama.cpp's expressions for these two can't tell capitals from small letters; the models' own can.
CASE_APART = {"youtu", "kimi-k2"}


def test_every_pre_tokenizer(vocabulary: Callable[[str], Checkpoint], recorded: dict[str, Any]) -> None:
    base = vocabulary("gpt-2")
    assert len(recorded["pre"]) > 70
    done: dict[str, list[list[int]]] = {}
    for pre, expected in recorded["pre"].items():
        key = repr(pre_tokenizer(pre))
        if key not in done:
            tokenizer = load_tokenizer(replace(base, metadata={**base.metadata, "tokenizer.ggml.pre": pre}))
            done[key] = [tokenizer.encode(text, False, False) for text in recorded["pre_texts"]]
        for text, found, ids in zip(recorded["pre_texts"], done[key], expected, strict=True):
            if not (pre in CASE_APART and "iPhone" in text):
                assert found == ids, (pre, text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("youtu", "GHI iPhone", ["GHI", " i", "Phone"]),
        ("kimi-k2", "iPhone漢字x", ["i", "Phone", "漢字", "x"]),
        ("afmoe", "1234567 漢字", ["1", "234", "567", " ", "漢字"]),
        ("tiny_aya", "1234567 a", ["1", "234", "567", " a"]),
        ("cohere2moe", "ab 12345", ["ab", " ", "12", "345"]),
        ("superbpe", "no cut 1234", ["no cut ", "1", "234"]),
        ("superbpe", "1 12 123 12345", ["1", " ", "12", " ", "123", " ", "12", "345"]),
        ("afmoe", "123456 1a", ["123", "456", " ", "1", "a"]),
        ("gpt-4o", "HTTPServer'S aÉb", ["HTTPServer'S", " a", "Éb"]),
        ("tekken", "12'S aB", ["1", "2", "'S", " a", "B"]),
    ],
)
def test_pieces(pre: str, text: str, pieces: list[str]) -> None:
    """Cuts that llama.cpp can't serve as a reference for, worked out by hand from the models' expressions."""
    assert cut(pre_tokenizer(pre).patterns, text) == pieces


def cut(patterns: tuple[str, ...], text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


ORIGINAL_DIGITS = {"tiny_aya": r"\d{1,3}(?=(?:\d{3})*\b)", "superbpe": r"(?=(\d{3})+(?!\d))"}


@pytest.mark.parametrize("pre", ORIGINAL_DIGITS)
@given(text=st.text("123 a_.½\n", max_size=25))
def test_linear_digits_cut_like_the_original(pre: str, text: str) -> None:
    """The models' own expressions look ahead from every group; ours must cut the same without that."""
    patterns = pre_tokenizer(pre).patterns
    original = (patterns[0], ORIGINAL_DIGITS[pre]) if pre == "superbpe" else (ORIGINAL_DIGITS[pre], patterns[-1])
    if pre == "superbpe" and "½" in text:
        return  # digits of other kinds are numbers there and not decimal
    assert cut(patterns, text) == cut(original, text)


def test_long_digits_take_no_time() -> None:
    start = time.process_time()
    for pre in ("tiny_aya", "superbpe", "afmoe"):
        assert "".join(cut(pre_tokenizer(pre).patterns, "1" * 500_000)) == "1" * 500_000
    assert time.process_time() - start < 60  # 0.7 where this was written, and 150 with the original expressions


def test_mmbert_words(tmp_path: Path) -> None:
    """Every line starts with an escaped space and each escaped space starts a word; newline runs are tokens."""
    words = ["▁", "a", "b", "▁a", "▁ab", "ab", "\n", "\n\n", "ba", "▁aba"]
    merges = ["▁ a", "a b", "▁a b", "b a", "▁ab a"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "mmbert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }
    tokenizer = load_tokenizer(Checkpoint(tmp_path / "mmbert.gguf", "gguf", metadata, {}))
    ids = tokenizer.encode("ab ab\n\nb a", add_special=False)
    assert [tokenizer.token_text(index) for index in ids] == ["▁ab", "▁ab", "\n\n", "▁", "b", "▁a"]


@pytest.mark.parametrize("model", ["smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"])
def test_prompts_of_real_models(model: str, prompts: dict[str, Any], request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue("smollm2_path" if model.startswith("smollm2") else "gemma3_path")
    tokenizer = load_tokenizer(open_checkpoint(path))
    for prompt in prompts[model]["prompts"]:
        assert tokenizer.encode(prompt["prompt"]) == prompt["prompt_tokens"]
        assert tokenizer.decode(prompt["tokens"]) == prompt["text"]
    other = "日本語 🙂 naïve"
    assert tokenizer.decode(tokenizer.encode(other, add_special=False)) == other
    assert tokenizer.encode("The capital of France is") == prompts[model]["prompts"][0]["prompt_tokens"]


def test_unknown_id_is_refused(tokenizer_of: TokenizerOf) -> None:
    from realizar.errors import InvalidRequestError

    tokenizer = tokenizer_of("gpt-2")
    for index in (-1, tokenizer.vocab_size):
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            tokenizer.decode([index])
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 1"):
        tokenizer.encode_rendered("a\ud800")
