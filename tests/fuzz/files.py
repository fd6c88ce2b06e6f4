"""Hostile model files by a seed: GGUF files and safetensors folders, whole ones with a few things wrong.

Structures are bent (odd values under real keys, steps of a tokenizer that write more than they read, tensors of odd
shapes) and bytes are damaged. Numbers far beyond the file's size are claimed; the files themselves stay small.
"""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save

from fuzz.values import anything, number, text
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.models import registry
from tiny_model import byte_symbols

FILE = "model.gguf"
_HIDDEN, _WIDTH, _HEADS, _LAYERS = 32, 64, 2, 2
_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
_ARCHITECTURES = tuple(registry._BY_GGUF_ARCHITECTURE)
_LONG = ("a" * 300, "a" * 2000, "x\0y", "\x1b[31m", "<s>", "s", "▁", "")
_NUMBERS = (b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\1\0\0\0", b"\t\0\0\0")
_LAYER = {
    ("attn_norm", "input_layernorm"): (_HIDDEN,),
    ("attn_q", "self_attn.q_proj"): (_HIDDEN, _HIDDEN),
    ("attn_k", "self_attn.k_proj"): (_HIDDEN, _HIDDEN),
    ("attn_v", "self_attn.v_proj"): (_HIDDEN, _HIDDEN),
    ("attn_output", "self_attn.o_proj"): (_HIDDEN, _HIDDEN),
    ("ffn_norm", "post_attention_layernorm"): (_HIDDEN,),
    ("ffn_gate", "mlp.gate_proj"): (_WIDTH, _HIDDEN),
    ("ffn_up", "mlp.up_proj"): (_WIDTH, _HIDDEN),
    ("ffn_down", "mlp.down_proj"): (_HIDDEN, _WIDTH),
}


def hostile_model(rng: Random) -> dict[str, bytes]:
    """The bytes of each file of one model, by name: `FILE` alone, or those of a folder."""
    if rng.random() < 0.5:
        data = _gguf(rng)
        return {FILE: _damaged(rng, data) if rng.random() < 0.4 else data}
    files = _folder(rng)
    name = rng.choice(sorted(files))
    if rng.random() < 0.3:
        files[name] = _damaged(rng, files[name])
    return files


def whole_model(form: str) -> dict[str, bytes]:
    """The model as it is before anything is wrong with it; `gguf` or `safetensors`."""
    return {FILE: _gguf(None)} if form == "gguf" else _folder(None)


def _shapes(place: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors as a form calls them: 0 GGUF's, 1 Hugging Face's."""
    names = (("token_embd", "output_norm", "output"), ("model.embed_tokens", "model.norm", "lm_head"))[place]
    sizes = ((262, _HIDDEN), (_HIDDEN,), (262, _HIDDEN))
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in zip(names, sizes, strict=True)}
    for layer in range(_LAYERS):
        before = ("blk", "model.layers")[place]
        shapes |= {f"{before}.{layer}.{key[place]}.weight": shape for key, shape in _LAYER.items()}
    return shapes


def _tokens() -> list[str]:
    return [*byte_symbols(), "ab", "cd", "abcd", "<s>", "</s>", "<unk>"]


def _gguf(rng: Random | None) -> bytes:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": _LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": _HIDDEN,
        "llama.feed_forward_length": _WIDTH,
        "llama.attention.head_count": _HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": _tokens(),
        "tokenizer.ggml.token_type": np.array([1] * 259 + [3, 3, 2], np.int32),
        "tokenizer.ggml.scores": np.arange(262, dtype=np.float32),
        "tokenizer.ggml.merges": ["a b", "c d", "ab cd"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.unknown_token_id": 261,
        "tokenizer.chat_template": _TEMPLATE,
    }
    shapes = _shapes(0)
    kinds = dict.fromkeys(shapes, GGMLType.F32)
    if rng is not None:
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            rng.choice((_bend_metadata, _bend_metadata, _bend_vocabulary))(rng, metadata)
        if rng.random() < 0.3:
            _bend_tensors(rng, shapes, kinds)
    return _written(metadata, shapes, kinds)


def _written(metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], kinds: dict[str, GGMLType]) -> bytes:
    """The file; values that no GGUF file can hold are left out."""
    random = np.random.default_rng(0)
    tensors = []
    for name, shape in shapes.items():
        tensor = NewTensor(name, kinds[name], shape, np.zeros(0, np.uint8))
        data = random.integers(0, 63, tensor.size_bytes, np.uint8)
        if kinds[name] is GGMLType.F32:
            data = (random.standard_normal(tensor.size_bytes // 4) / 6).astype(np.float32).view(np.uint8)
        tensors.append(NewTensor(name, kinds[name], shape, data))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        for key in list(metadata):
            try:
                write_gguf(path, {key: metadata[key]})
            except (ValueError, TypeError, OverflowError, KeyError, AttributeError, struct.error):
                del metadata[key]
        write_gguf(path, metadata, tensors)
        return path.read_bytes()


def _bend_metadata(rng: Random, metadata: dict[str, Any]) -> None:
    key = rng.choice(sorted(metadata))
    kind = rng.random()
    if kind < 0.15:
        del metadata[key]
    elif kind < 0.3:
        name = rng.choice((*_ARCHITECTURES, text(rng)[:40]))
        renamed = {old.replace("llama.", f"{name}."): value for old, value in metadata.items()}
        metadata.clear()
        metadata.update(renamed | {"general.architecture": name})
    elif kind < 0.4:
        metadata[f"{rng.choice((*_ARCHITECTURES, 'odd'))}.{rng.choice(_ODD_KEYS)}"] = anything(rng, 1)
    elif isinstance(metadata[key], list | np.ndarray):
        values = list(metadata[key])
        values[rng.randrange(len(values) or 1) : rng.randrange(len(values) + 1)] = [number(rng)] * rng.randrange(3)
        metadata[key] = rng.choice((values, [str(value) for value in values], values[:1]))
    else:
        metadata[key] = rng.choice((number(rng), anything(rng, 2), text(rng)))


_ODD_KEYS = (
    *("vocab_size", "expert_count", "rope.scaling.type", "rope.scaling.factor", "rope.dimension_count"),
    *("attention.key_length", "attention.head_count_kv", "attention.sliding_window", "attention.scale", "logit_scale"),
    *("split.count", "split.no", "general.alignment", "odd"),
)


def _bend_vocabulary(rng: Random, metadata: dict[str, Any]) -> None:
    metadata["tokenizer.ggml.model"] = rng.choice(("gpt2", "llama", "t5", "bert", "whitespace", "gemma4"))
    metadata["tokenizer.ggml.pre"] = rng.choice(("gpt-2", "llama-bpe", "qwen2", "deepseek-v3", "default", "odd"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        for _ in range(rng.randrange(3)):
            tokens[rng.randrange(len(tokens))] = rng.choice((*_LONG, text(rng)))
        kinds = np.array([rng.choice((1, 1, 1, 2, 3, 4, 5, 6)) for _ in tokens], np.int32)
        metadata["tokenizer.ggml.token_type"] = kinds
    if rng.random() < 0.3:
        data = bytearray(rng.randbytes(rng.choice((0, 4, 40, 4000))))
        data[:4] = rng.choice((4, 8, 1024, 2**32 - 4)).to_bytes(4, "little")
        metadata["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(bytes(data), np.uint8)
    if rng.random() < 0.2:
        metadata["tokenizer.chat_template"] = rng.choice((text(rng), "{{ messages[0].content * 10**9 }}", "{% for %}"))


def _bend_tensors(rng: Random, shapes: dict[str, tuple[int, ...]], kinds: dict[str, GGMLType]) -> None:
    name = rng.choice(sorted(shapes))
    kind = rng.randrange(4)
    if kind == 0:
        del shapes[name]
    elif kind == 1:
        kinds[name] = rng.choice([each for each in GGMLType if shapes[name][-1] % each.block_size == 0])
    elif kind == 2:
        shapes[name] = rng.choice(((1,), (32, 1), (2, 2, 8), (262, 64), (1, 32)))
    else:
        odd = text(rng)[:60].encode(errors="replace").decode() or "odd"
        shapes[odd], kinds[odd] = (4,), GGMLType.F32


def _folder(rng: Random | None) -> dict[str, bytes]:
    parts: dict[str, Any] = {
        "config.json": {
            "model_type": "llama", "hidden_size": _HIDDEN, "intermediate_size": _WIDTH, "vocab_size": 262,
            "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "hidden_act": "silu",
        },
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": _TEMPLATE},
        "generation_config.json": {"eos_token_id": [260], "temperature": 0.5, "top_k": 3},
    }  # fmt: skip
    weights = {name: np.zeros(shape, np.float32) for name, shape in _shapes(1).items()}
    if rng is not None:
        for _ in range(rng.choice((1, 1, 2, 4))):
            kind = rng.random()
            if kind < 0.35:
                _add_step(rng, parts["tokenizer.json"])
            elif kind < 0.9:
                _bend_json(rng, parts[rng.choice(sorted(parts))])
            else:
                weights[rng.choice(sorted(weights))] = np.zeros(rng.choice(((1,), (2, 2), (0, 4))), np.float16)
    files = {name: json.dumps(value).encode() for name, value in parts.items()}
    return {**files, "model.safetensors": save(weights)}


def _tokenizer() -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 259 + at, "content": text, "special": True, **flags} for at, text in enumerate(_tokens()[259:])]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [byte_level]},
        "post_processor": {
            "type": "TemplateProcessing", "single": template, "pair": template,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(_tokens())}, "merges": ["a b", "c d", "ab cd"],
        },
    }  # fmt: skip


_STEPS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "normalizers": lambda rng: rng.choice(
        (
            {"type": "Replace", "pattern": {rng.choice(("String", "Regex")): _pattern(rng)}, "content": text(rng)[:99]},
            {"type": "Prepend", "prepend": rng.choice(_LONG)},
            {"type": "Precompiled", "precompiled_charsmap": rng.choice(("AAAA", "/////w==", "CAAAAP////8AAQIDAAAA"))},
            {"type": rng.choice(("NFKC", "NFD", "Lowercase", "StripAccents", "Nmt", "ByteLevel", "Odd"))},
        )
    ),
    "pretokenizers": lambda rng: rng.choice(
        (
            {
                "type": "Split",
                "pattern": {"Regex": _pattern(rng)},
                "behavior": "Isolated",
                "invert": rng.random() < 0.5,
            },
            {"type": "FixedLength", "length": rng.choice((0, 1, 2**40))},
            {
                "type": "Metaspace",
                "replacement": rng.choice(("▁", "", "ab")),
                "prepend_scheme": "always",
                "split": True,
            },
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
            {"type": rng.choice(("Digits", "Punctuation", "Whitespace", "BertPreTokenizer", "UnicodeScripts"))},
        )
    ),
}


def _pattern(rng: Random) -> str:
    return rng.choice((" ", "", "a", "x*", "(a+)+b", "(?=(a+)+b)", "(", "(?:a{1000}){1000}", "\\p{L}+", "." * 3000))


def _add_step(rng: Random, tokenizer: dict[str, Any]) -> None:
    place = rng.choice((("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")))
    sequence = tokenizer.get(place[0])
    if isinstance(sequence, dict) and isinstance(steps := sequence.get(place[1]), list):
        steps.extend([_STEPS[place[1]](rng)] * rng.choice((1, 1, 2, 30, 200)))


def _bend_json(rng: Random, value: Any) -> None:
    """Change one place somewhere in the tree."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
            value = value[key]
            continue
        kind = rng.random()
        if kind < 0.2:
            del value[key]
        elif kind < 0.3 and isinstance(value, list):
            value.extend(copy.deepcopy(value[-1:]) * rng.choice((1, 40, 3000)))
        elif kind < 0.4 and isinstance(value, dict):
            value[text(rng)[:40]] = anything(rng, 1)
        else:
            value[key] = rng.choice((anything(rng, 2), number(rng), text(rng), rng.choice(_LONG)))
        return


def _damaged(rng: Random, data: bytes) -> bytes:
    """Bytes changed, cut, repeated, or numbers written over them; more at the beginning, where headers are."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        if not damaged:
            break
        place = rng.randrange(min(len(damaged), rng.choice((32, 500, len(damaged)))))
        kind = rng.randrange(5)
        if kind == 0:
            damaged[place] = rng.randrange(256)
        elif kind == 1:
            piece = rng.choice(_NUMBERS)
            damaged[place : place + len(piece)] = piece
        elif kind == 2:
            del damaged[place : place + rng.choice((1, 8, 100, len(damaged)))]
        elif kind == 3:
            damaged[place:place] = damaged[place : place + rng.choice((1, 8, 100, 4000))]
        else:
            damaged[place:place] = rng.randbytes(rng.randrange(30))
    return bytes(damaged)
