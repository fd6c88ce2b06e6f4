"""Qwen2, Qwen3 and the text model of Qwen3-VL with experts in place of most layers' feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from realizar.models.architectures.qwen import read_vision_keys
from realizar.models.dimensions import MAX_FEED_FORWARD, MAX_LAYERS, Dimensions, read_dimensions
from realizar.models.experts import (
    APART,
    Joined,
    build_experts,
    build_shared,
    build_shared_gate,
    read_expert_count,
    read_experts_per_token,
)
from realizar.models.hyper_parameters import REQUIRED, HyperParameters
from realizar.models.multimodal import is_other_part, text_prefix
from realizar.models.parts import Activation, Rope
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Experts, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import is_unneeded

SHARED_NAMES = {
    f"mlp.shared_experts.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
}  # fmt: skip
"""Names of a shared expert in safetensors checkpoints, by their canonical ones."""


def build_qwen2(hparams: HyperParameters) -> ModelSpec:
    """Qwen2 with experts, biases on Q, K and V, and a shared expert behind a gate. Weights sum to less than one."""
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes, names=None if hparams.is_gguf else SHARED_NAMES)
    shared = hparams.integer(
        "expert_shared_feed_forward_length",
        "shared_expert_intermediate_size",
        high=MAX_FEED_FORWARD,
        default=sizes.feed_forward_size if hparams.is_gguf else REQUIRED,  # as llama.cpp has it
    )
    normalized = hparams.boolean(None, "norm_topk_prob", default=False)
    qkv_bias = builder.bias("qkv_bias", "self_attn.q_proj", default=not hparams.is_gguf)

    def with_shared(experts: Experts, index: int, activation: Activation) -> Experts:
        part = build_shared(builder, index, activation, shared)
        return replace(experts, shared=part, shared_gate=build_shared_gate(builder, index))

    return _build(builder, read_rope(hparams, sizes), normalized, qkv_bias, qk_norm=False, complete=with_shared)


def build_qwen3(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes)
    if not hparams.boolean(None, "use_qk_norm", default=True):  # Qwen3-Coder names what every one of these models has
        raise hparams.unsupported(None, "use_qk_norm", False)
    # A GGUF file can't say that weights are not divided by their sum, nor that some layers are dense.
    normalized = hparams.boolean(None, "norm_topk_prob", default=hparams.is_gguf)
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    return _build(builder, read_rope(hparams, sizes), normalized, qkv_bias, qk_norm=True)


def build_qwen3vl(hparams: HyperParameters) -> ModelSpec:
    """The text model of Qwen3-VL with experts, whose weights transformers divides by their sum whatever a key says.

    Published experts lie transposed; those that transformers saves do not.
    """
    read_vision_keys(hparams)
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes, prefix=text_prefix(hparams))
    if not hparams.boolean(None, "norm_topk_prob", default=True):
        raise hparams.unsupported(None, "norm_topk_prob", False)
    rope = read_rope(hparams, sizes, default_base=10000.0 if hparams.is_gguf else 5e5, has_axes=True)
    qkv_bias, joined = builder.bias("attention_bias", "self_attn.q_proj"), Joined(transposed=None)
    return _build(builder, rope, True, qkv_bias, qk_norm=True, joined=joined, is_ignored=is_other_part)


def _build(
    builder: SpecBuilder,
    rope: Rope,
    normalized: bool,
    qkv_bias: bool,
    *,
    qk_norm: bool,
    joined: Joined = APART,
    complete: Callable[[Experts, int, Activation], Experts] = lambda experts, _index, _activation: experts,
    is_ignored: Callable[[str], bool] = is_unneeded,
) -> ModelSpec:
    """A model; `complete` adds to the experts of a layer what they share."""
    hparams, sizes = builder.hparams, builder.sizes
    if hparams.boolean(None, "use_sliding_window", default=False):
        raise hparams.unsupported(None, "use_sliding_window", True)
    count = read_expert_count(hparams)
    per_token = read_experts_per_token(hparams, count)
    width = hparams.integer(
        "expert_feed_forward_length",
        "moe_intermediate_size",
        high=MAX_FEED_FORWARD,
        # As llama.cpp has it.
        default=max(sizes.feed_forward_size // hparams.integer("expert_used_count", None, high=count), 1)
        if hparams.is_gguf
        else REQUIRED,
    )
    is_dense, activation = read_dense_layers(hparams, sizes), builder.activation()
    output_bias = builder.bias("attention_bias", "self_attn.o_proj") if qk_norm else False

    def experts(index: int) -> Experts:
        plain = build_experts(
            builder, index, activation, count=count, per_token=per_token, width=width, normalized=normalized,
            joined=joined,
        )  # fmt: skip
        return complete(plain, index, activation)

    layers = [
        Layer(
            mixer=builder.attention(
                index, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm="head" if qk_norm else None
            ),
            feed_forward=builder.feed_forward(index, activation) if is_dense[index] else experts(index),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False, is_ignored=is_ignored)


def read_dense_layers(hparams: HyperParameters, sizes: Dimensions) -> list[bool]:
    """Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th."""
    step = hparams.integer(None, "decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = hparams.raw(None, "mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(index, bool) or not isinstance(index, int) for index in dense):
        raise hparams.malformed(None, "mlp_only_layers", "expected a list of layers")
    return [index in dense or (index + 1) % step != 0 for index in range(sizes.num_layers)]
