"""Checkpoints in FP8 of the shapes that `generate` knows, made in memory: blocks of 128 x 128, activations in FP8 too.

Embedding, head, norms, routers, gates of shared experts and the two small matrices of a delta net are in bf16, as
published folders have them. Layers' matrices of one shape have the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.generated.shapes import SHAPES, Shape

MODEL_TYPES = {
    "llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}  # fmt: skip
_PERIOD, _DELTA_SIZE, _TAPS = 4, 128, 4  # layers up to one with attention, a delta net's heads, its convolution
_TYPES: dict[str, tuple[str, GGMLType | None]] = {
    "uint8": ("F8_E4M3", None), "uint16": ("BF16", GGMLType.BF16), "float32": ("F32", GGMLType.F32),
}  # fmt: skip


def fp8_checkpoint(name: str) -> Checkpoint:
    """A folder's tensors and configuration."""
    made = _Maker(SHAPES[name])
    return Checkpoint(made.path, "safetensors", {"config": made.config()}, made.tensors(), None)


class _Maker:
    def __init__(self, shape: Shape) -> None:
        self.shape, self.path = shape, Path("random_fp8")
        self.rng = np.random.default_rng(1)
        self._made: dict[tuple[int, ...], tuple[NDArray[Any], NDArray[Any]]] = {}
        self._tensors: dict[str, StoredTensor] = {}

    def is_attention(self, layer: int) -> bool:
        return not self.shape.key_heads or (layer + 1) % _PERIOD == 0

    def config(self) -> dict[str, Any]:
        shape = self.shape
        found: dict[str, Any] = {
            "model_type": MODEL_TYPES[shape.architecture], "num_hidden_layers": self.shape.num_layers,
            "max_position_embeddings": shape.context_length, "hidden_size": shape.hidden_size,
            "intermediate_size": shape.feed_forward_size, "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_size, "rms_norm_eps": shape.norm_eps,
            "vocab_size": shape.vocab_size, "hidden_act": "silu", "tie_word_embeddings": shape.tied,
            "rope_theta": shape.rope_theta,
            "quantization_config": {
                "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            },
        }  # fmt: skip
        if shape.num_experts:
            found |= {
                "num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token,
                "moe_intermediate_size": shape.expert_size, "norm_topk_prob": True,
            }  # fmt: skip
        if shape.key_heads:
            found |= {
                "linear_num_key_heads": shape.key_heads, "linear_num_value_heads": shape.value_heads,
                "linear_key_head_dim": _DELTA_SIZE, "linear_value_head_dim": _DELTA_SIZE,
                "linear_conv_kernel_dim": _TAPS, "full_attention_interval": _PERIOD,
            }  # fmt: skip
            if shape.num_experts:
                found["shared_expert_intermediate_size"] = shape.expert_size
        return found

    def tensors(self) -> dict[str, StoredTensor]:
        shape, hidden = self.shape, self.shape.hidden_size
        part = self.bf16(shape.vocab_size // 32, hidden, 0.02)
        self.put("model.embed_tokens.weight", np.tile(part, (32, 1)))
        if not shape.tied:
            self.put("lm_head.weight", np.tile(np.roll(part, 7, 0), (32, 1)))
        self.norm("model.norm", hidden)
        for layer in range(self.shape.num_layers):
            base = f"model.layers.{layer}"
            self.norm(f"{base}.input_layernorm", hidden)
            self.norm(f"{base}.post_attention_layernorm", hidden)
            if self.is_attention(layer):
                self.attention(f"{base}.self_attn")
            else:
                self.delta_net(f"{base}.linear_attn")
            self.feed_forward(f"{base}.mlp")
        return self._tensors

    def attention(self, base: str) -> None:
        shape, hidden = self.shape, self.shape.hidden_size
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.fp8(f"{base}.q_proj", queries * (2 if shape.key_heads else 1), hidden)
        self.fp8(f"{base}.k_proj", keys, hidden)
        self.fp8(f"{base}.v_proj", keys, hidden)
        self.fp8(f"{base}.o_proj", hidden, queries)
        if shape.architecture != "llama":
            self.norm(f"{base}.q_norm", shape.head_size)
            self.norm(f"{base}.k_norm", shape.head_size)

    def delta_net(self, base: str) -> None:
        shape, hidden = self.shape, self.shape.hidden_size
        keys, values = shape.key_heads * _DELTA_SIZE, shape.value_heads * _DELTA_SIZE
        self.fp8(f"{base}.in_proj_qkv", 2 * keys + values, hidden)
        self.fp8(f"{base}.in_proj_z", values, hidden)
        self.fp8(f"{base}.out_proj", hidden, values)
        for name in "ba":
            self.put(f"{base}.in_proj_{name}.weight", self.bf16(shape.value_heads, hidden, 0.02))
        self.put(f"{base}.conv1d.weight", self.bf16(2 * keys + values, _TAPS, 0.4)[:, None])
        self.put(f"{base}.dt_bias", np.zeros(shape.value_heads, np.float32))
        self.put(f"{base}.A_log", np.log(self.rng.uniform(1, 16, shape.value_heads)).astype(np.float32))
        self.put(f"{base}.norm.weight", np.ones(_DELTA_SIZE, np.float32))

    def feed_forward(self, base: str) -> None:
        shape = self.shape
        if not shape.num_experts:
            self.gated(base, shape.feed_forward_size)
            return
        self.put(f"{base}.gate.weight", self.bf16(shape.num_experts, shape.hidden_size, shape.hidden_size**-0.5))
        for expert in range(shape.num_experts):
            self.gated(f"{base}.experts.{expert}", shape.expert_size)
        if shape.key_heads:
            self.gated(f"{base}.shared_expert", shape.expert_size)
            self.put(f"{base}.shared_expert_gate.weight", self.bf16(1, shape.hidden_size, 0.02))

    def gated(self, base: str, width: int) -> None:
        self.fp8(f"{base}.gate_proj", width, self.shape.hidden_size)
        self.fp8(f"{base}.up_proj", width, self.shape.hidden_size)
        self.fp8(f"{base}.down_proj", self.shape.hidden_size, width)

    def norm(self, name: str, size: int) -> None:
        self.put(f"{name}.weight", np.full(size, 0.0 if self.shape.key_heads else 1.0, np.float32))

    def fp8(self, name: str, *size: int) -> None:
        if size not in self._made:
            codes = self.rng.integers(0, 255, size, np.uint8)
            codes[codes & 0x7F == 0x7F] = 0
            scales = self.rng.uniform(0.5, 1.5, [-(-each // 128) for each in size]) / (150 * size[1] ** 0.5)
            self._made[size] = codes, scales.astype(np.float32)
        codes, scales = self._made[size]
        self.put(f"{name}.weight", codes)
        self.put(f"{name}.weight_scale_inv", scales)

    def bf16(self, rows: int, cols: int, deviation: float) -> NDArray[np.uint16]:
        values = self.rng.standard_normal((rows, cols), np.float32) * np.float32(deviation)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def put(self, name: str, data: NDArray[Any]) -> None:
        dtype, ggml_type = _TYPES[str(data.dtype)]
        stored = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self._tensors[name] = StoredTensor(
            name, ggml_type, data.shape, stored, self.path / "model.safetensors", 0, dtype
        )
