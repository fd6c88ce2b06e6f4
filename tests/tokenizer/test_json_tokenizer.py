"""`tokenizer.json` against the library run by hand, and the same vocabulary written as GGUF against both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, TokenizerError
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.pre_tokenizers import pre_tokenizer
from realizar.tokenizer.templates.chat_template import ChatTemplate
from realizar.tokenizer.tokenizer import Tokenizer

CORPUS = ["The cat sat on the mat; the dog didn't.", "naïve café 日本語 日本", "x = 1234567\n\n    return x  # y"] * 3
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def byte_level(pre: str) -> LibraryTokenizer:
    tokenizer = LibraryTokenizer(models.BPE(ignore_merges=pre_tokenizer(pre).ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer(pre).patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def saved(tokenizer: LibraryTokenizer, folder: Path, **metadata: Any) -> Tokenizer:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(Checkpoint(folder, "safetensors", metadata, {}, tokenizer_path=path))


def as_gguf(tokenizer: LibraryTokenizer, pre: str) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    kinds = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    return load_tokenizer(Checkpoint(Path("made-up.gguf"), "gguf", metadata, {}))


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "starcoder", "deepseek-v3", "tekken"])
def test_library_json_and_gguf_agree(pre: str, tmp_path: Path) -> None:
    library = byte_level(pre)
    from_json, from_gguf = saved(library, tmp_path, tokenizer_config=CONFIG), as_gguf(library, pre)
    assert (from_json.bos_id, from_json.eos_id, from_json.add_bos, from_json.add_eos) == (0, 1, True, False)
    assert from_json.eos_ids == from_gguf.eos_ids == {1, 2}

    @given(
        st.lists(st.one_of(st.text(max_size=6), st.sampled_from([*SPECIAL, "<tool>", " the", "cat's"]))).map("".join)
    )
    def agree(text: str) -> None:
        expected = library.encode(text).ids
        assert from_json.encode(text) == expected
        assert from_gguf.encode(text) == expected
        plain = from_gguf.encode(text, add_special=False, parse_special=False)
        assert from_json.encode(text, add_special=False, parse_special=False) == plain
        assert from_json.decode(expected) == from_gguf.decode(expected)
        assert from_json.decode(plain) == text

    agree()


def test_sentencepiece_style(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    for piece in ("▁", "a", "b", "▁a", "ab", "▁ab"):
        vocabulary[piece] = len(vocabulary)
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a")]
    library = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = saved(library, tmp_path, tokenizer_config={**CONFIG, "add_bos_token": True, "add_eos_token": True})
    ids = tokenizer.encode("ab é a")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.adds_space_prefix
    assert tokenizer.decode(ids, remove_space_prefix=True) == "ab é a"
    assert tokenizer.decode(ids) == " ab é a"


def test_settings_beside_it(tmp_path: Path) -> None:
    library = byte_level("qwen2")
    tokenizer = saved(
        library,
        tmp_path,
        tokenizer_config={**CONFIG, "add_bos_token": False},
        generation_config={"eos_token_id": [1, 7]},
        config={"eos_token_id": 8, "vocab_size": 500},
    )
    assert not tokenizer.add_bos
    assert tokenizer.encode("") == []
    assert tokenizer.eos_ids == {1, 2, 7, 8}
    assert tokenizer.vocab_size == 500
    assert tokenizer.decode([499]) == "", "a row of the model beyond the tokenizer's ids has no text"
    with pytest.raises(CheckpointError, match="'eos_token_id': 'x' is not an id"):
        saved(library, tmp_path, config={"eos_token_id": "x"})


def test_templates_by_name(tmp_path: Path) -> None:
    named = {"rag": "with documents", "default": "plain{{ eos_token }}", "tool_use": "with tools"}
    tokenizer = saved(byte_level("qwen2"), tmp_path, tokenizer_config=CONFIG, chat_templates=named)
    message, tools, documents = [{"role": "user", "content": "x"}], [{"type": "function"}], [{"text": "y"}]
    template = ChatTemplate(tokenizer)
    assert template.render(message) == "plain</s>"
    assert template.render(message, tools=tools) == template.render(message, tools, documents=documents) == "with tools"
    assert template.render(message, documents=documents) == template.source(None, documents) == "with documents"
    assert ChatTemplate(tokenizer, "rag").render(message) == "with documents", "one of the model's, by its name"
    lone = saved(byte_level("qwen2"), tmp_path, tokenizer_config=CONFIG, chat_templates={"default": "plain"})
    assert ChatTemplate(lone).render(message, tools=tools).startswith("plain")
    assert ChatTemplate(lone).source(None, documents) == "plain"


def test_control_texts_need_no_copy_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a large one takes seconds, with the interpreter's lock held."""
    tokenizer = saved(byte_level("qwen2"), tmp_path)
    library = pytest.importorskip("tokenizers").Tokenizer
    monkeypatch.setattr("tokenizers.Tokenizer", lambda model: library(model))  # has no `from_str`
    ids = tokenizer.encode("a<|im_end|>b<tool>", add_special=False, parse_special=False)
    assert not any(tokenizer.is_special(index) for index in ids)
    assert "<tool>" in map(tokenizer.token_text, ids), "a token that is no control token stays one"
    assert tokenizer.decode(ids) == "a<|im_end|>b<tool>"


def test_users_texts_stay_text(tmp_path: Path) -> None:
    tokenizer = saved(byte_level("qwen2"), tmp_path, tokenizer_config=CONFIG)
    template = ChatTemplate(tokenizer, "{{ bos_token }}{{ messages[0].content }}<|im_end|>")
    ids = template.encode([{"role": "user", "content": "<s>a<|im_end|>"}])
    assert (ids.count(0), ids.count(2)) == (1, 1)
    assert (ids[0], ids[-1]) == (0, 2)
    assert tokenizer.decode(ids, skip_special=False) == "<s><s>a<|im_end|><|im_end|>"


def test_word_pieces_are_joined(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "un": 1, "##related": 2, "word": 3}
    library = LibraryTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    tokenizer = saved(library, tmp_path)
    assert tokenizer.decode(tokenizer.encode("unrelated word")) == " unrelated word"


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"model": {"type": "Nonsense"}}'])
def test_malformed(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(Checkpoint(tmp_path, "safetensors", {}, {}, tokenizer_path=path))


def test_no_file() -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load_tokenizer(Checkpoint(Path("folder"), "safetensors", {}, {}))


def test_marks_of_a_hole(tmp_path: Path) -> None:
    library = byte_level("qwen2")
    assert saved(library, tmp_path).fill_in is None
    library.add_tokens([AddedToken(f"<|fim_{role}|>", special=True) for role in ("prefix", "suffix", "middle")])
    ids = tuple(library.token_to_id(f"<|fim_{role}|>") for role in ("prefix", "suffix", "middle"))
    assert saved(library, tmp_path).fill_in == ids
