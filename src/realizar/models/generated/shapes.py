"""`SHAPES`: the sizes of models that `generate` makes with random weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

FileType: TypeAlias = Literal["q4_k_m", "q8_0", "f16", "bf16", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model of the llama kind.

    Attributes:
        architecture: as in GGUF files.
        num_experts: in place of each layer's feed-forward; 0 for a dense one.
        expert_size: between an expert's up and down projection.
        full_head_size, full_kv_heads: of layers without a window, where these differ.
        key_heads, value_heads: of gated delta nets, which three of four layers are.
        attention_layers: of models whose other layers are short convolutions. dense_layers: those before experts.
        drafts: there is a next-token block behind the layers.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool
    rope_theta: float
    norm_eps: float
    context_length: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    full_head_size: int = 0
    full_kv_heads: int = 0
    key_heads: int = 0
    value_heads: int = 0
    attention_layers: tuple[int, ...] = ()
    dense_layers: int = 0
    drafts: bool = False


SHAPES: dict[str, Shape] = {
    "llama-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 5e5, 1e-5, 131072),
    "llama-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, True, 5e5, 1e-5, 131072),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True, 1e6, 1e-6, 32768),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True, 1e6, 1e-6, 40960),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, False, 1e6, 1e-6, 40960, 128, 8, 768),
    "olmoe-7b": Shape("olmoe", 16, 2048, 1024, 16, 16, 128, 50304, False, 1e4, 1e-5, 4096, 64, 8, 1024),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, False, 1.5e5, 1e-5, 131072, 32, 4, 2880),
    "gpt-oss-120b": Shape("gpt-oss", 36, 2880, 2880, 64, 8, 64, 201088, False, 1.5e5, 1e-5, 131072, 128, 4, 2880),
    "gemma4-26b-a4b": Shape("gemma4", 30, 2816, 2112, 16, 8, 256, 262144, True, 1e6, 1e-6, 262144, 128, 8, 704, 512, 2),
    "qwen3.5-0.8b": Shape(
        "qwen35", 24, 1024, 3584, 8, 2, 256, 248320, True, 1e7, 1e-6, 262144, key_heads=16, value_heads=16
    ),
    "qwen3.6-27b": Shape(
        "qwen35", 64, 5120, 17408, 24, 4, 256, 248320, False, 1e7, 1e-6, 262144, key_heads=16, value_heads=48
    ),
    "qwen3.6-35b-a3b": Shape(
        "qwen35moe", 40, 2048, 512, 16, 2, 256, 248320, False, 1e7, 1e-6, 262144, 256, 8, 512,
        key_heads=16, value_heads=32,
    ),
    "lfm2-1.2b": Shape(
        "lfm2", 16, 2048, 8192, 32, 8, 64, 65536, True, 1e6, 1e-5, 128000, attention_layers=(2, 5, 8, 10, 12, 14)
    ),
    "lfm2-8b-a1b": Shape(
        "lfm2moe", 24, 2048, 7168, 32, 8, 64, 65536, True, 1e6, 1e-5, 128000, 32, 4, 1792,
        attention_layers=(2, 6, 10, 14, 18, 21), dense_layers=2,
    ),
    "tiny": Shape("llama", 2, 256, 512, 4, 2, 64, 512, False, 1e4, 1e-5, 2048),
    "small": Shape("llama", 2, 2048, 2048, 8, 2, 64, 512, False, 1e4, 1e-5, 2048),
    "tiny-window": Shape("gemma3", 2, 256, 512, 4, 2, 64, 512, True, 1e6, 1e-6, 2048),
    "tiny-moe": Shape("qwen3moe", 2, 256, 512, 4, 2, 64, 512, False, 1e6, 1e-6, 2048, 8, 2, 256),
    "tiny-delta": Shape("qwen35", 4, 256, 512, 2, 1, 128, 512, False, 1e7, 1e-6, 2048, key_heads=1, value_heads=2),
    "tiny-convolution": Shape("lfm2", 3, 256, 512, 4, 2, 64, 512, True, 1e6, 1e-5, 2048, attention_layers=(1,)),
}  # fmt: skip
SHAPES |= {
    f"{name}-mtp": replace(shape, drafts=True) for name, shape in SHAPES.items() if "qwen35" in shape.architecture
}
"""Those of `PUBLISHED`, and six small ones to try a device out; `-mtp` names a shape with its next-token block."""

PUBLISHED: dict[str, str] = {
    "llama-8b": "Llama-3.1-8B",
    "llama-1b": "Llama-3.2-1B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "olmoe-7b": "OLMoE-1B-7B",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gemma4-26b-a4b": "Gemma 4 26B-A4B",
    "qwen3.5-0.8b": "Qwen3.5-0.8B",
    "qwen3.6-27b": "Qwen3.6-27B",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
    "lfm2-1.2b": "LFM2-1.2B",
    "lfm2-8b-a1b": "LFM2-8B-A1B",
}
"""Names of the models whose shapes are known."""
