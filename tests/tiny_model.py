"""A model that can be served: two small layers of random weights, and a vocabulary of bytes."""

from __future__ import annotations

from pathlib import Path

from realizar.bench.generate import generate_gguf
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint

_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in shown}
    hidden = [byte for byte in range(256) if byte not in symbols]
    symbols |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [symbols[byte] for byte in range(256)]


def write_tiny_model(path: Path, template: str = _TEMPLATE, context: int = 2048, shape: str = "tiny") -> None:
    """Id b is byte b, 256 ends an answer, those above spell themselves. The shape has a vocabulary of 512."""
    weights = path.with_name(f"{path.stem}-weights.gguf")
    generate_gguf(shape, weights, GGMLType.Q4_0)
    checkpoint = open_checkpoint(weights)
    metadata = {
        **checkpoint.metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_symbols(), "<|end|>", *(f"<|{number}|>" for number in range(257, 512))],
        "tokenizer.ggml.token_type": [1] * 256 + [3] + [4] * 255,
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
