"""A model that can be served: two small layers of random weights, and a vocabulary of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.models.generated.generate import generate_gguf

RERANK_TEMPLATE = "judge<|end|>{query}<|300|>{document}<|end|>"
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in symbols]
    symbols |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [symbols[byte] for byte in range(256)]


def write_tiny_model(
    path: Path, template: str = _TEMPLATE, context: int = 2048, shape: str = "tiny", marks: Sequence[str] = ()
) -> None:
    """Id b is byte b, 256 ends an answer, the next are `marks`, and those above spell themselves.

    The shape has a vocabulary of 512.
    """
    first = 257 + len(marks)
    weights = path.with_name(f"{path.stem}-weights.gguf")
    generate_gguf(shape, weights, GGMLType.Q4_0)
    checkpoint = open_checkpoint(weights)
    metadata = {
        **checkpoint.metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [
            *byte_symbols(),
            "<|end|>",
            *marks,
            *(f"<|{number}|>" for number in range(first, 512)),
        ],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (1 + len(marks)) + [4] * (255 - len(marks)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": template,
        f"{checkpoint.metadata['general.architecture']}.context_length": context,
    }
    tensors = [
        NewTensor(name, tensor.ggml_type, tensor.shape, tensor.data) for name, tensor in checkpoint.tensors.items()
    ]
    write_gguf(path, metadata, tensors)
    weights.unlink()


def write_reranker(path: Path, labels: list[str], template: str | None = RERANK_TEMPLATE) -> np.ndarray[Any, Any]:
    """A tiny model with a head; returns its weight, float32 [labels, hidden_size]."""
    plain = path.with_name("plain.gguf")
    write_tiny_model(plain)
    checkpoint = open_checkpoint(plain)
    size = checkpoint.tensors["token_embd.weight"].shape[-1]
    weight = np.random.default_rng(3).standard_normal((len(labels), size)).astype(np.float32)
    architecture = checkpoint.metadata["general.architecture"]
    metadata = {
        **checkpoint.metadata,
        f"{architecture}.pooling_type": 4,
        f"{architecture}.classifier.output_labels": labels,
    }
    if template is not None:
        metadata["tokenizer.chat_template.rerank"] = template
    tensors = [NewTensor(name, each.ggml_type, each.shape, each.data) for name, each in checkpoint.tensors.items()]
    head = NewTensor("cls.output.weight", GGMLType.F32, weight.shape, weight.view(np.uint8).reshape(-1))
    write_gguf(path, metadata, [*tensors, head])
    plain.unlink()
    return weight
