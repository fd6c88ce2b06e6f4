"""Qwen3-Next and Qwen3.5 to 3.8: most layers are a gated delta net, the others attention with an output gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from realizar.models.architectures.qwen import read_vision_keys
from realizar.models.architectures.qwen_moe import SHARED_NAMES, read_dense_layers
from realizar.models.delta_net import build_delta_net, read_delta_sizes
from realizar.models.dimensions import MAX_FEED_FORWARD, MAX_LAYERS, Dimensions, read_dimensions
from realizar.models.experts import (
    build_experts,
    build_shared,
    build_shared_gate,
    read_expert_count,
    read_experts_per_token,
)
from realizar.models.hyper_parameters import REQUIRED, HyperParameters
from realizar.models.multimodal import is_other_part, text_prefix
from realizar.models.next_token import next_token_tensors, read_next_token_blocks, without_next_token_blocks
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import AnyFeedForward, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import is_unneeded

_GGUF_NAMES = {"post_attention_layernorm": "post_attention_norm"}
_PERIOD = 4  # layers, of which the last is attention

BuildFeedForward = Callable[[int], AnyFeedForward]


def build_qwen35(hparams: HyperParameters) -> ModelSpec:
    builder, blocks = _start(hparams, is_part=True)
    activation = builder.activation()
    layers = _layers(builder, lambda index: builder.feed_forward(index, activation), tiled=hparams.is_gguf)
    is_ignored = next_token_tensors(builder.sizes, blocks, is_other_part)
    return builder.spec(layers, tied_by_default=False, is_ignored=is_ignored)


def build_qwen35_mixture(hparams: HyperParameters) -> ModelSpec:
    """The text model of Qwen3.5, 3.6 and 3.8 with experts, whose weights are always divided by their sum."""
    builder, blocks = _start(hparams, is_part=True)
    if not hparams.boolean(None, "norm_topk_prob", default=True):
        raise hparams.unsupported(None, "norm_topk_prob", False)
    layers = _layers(builder, _mixtures(builder, normalized=True), tiled=hparams.is_gguf)
    is_ignored = next_token_tensors(builder.sizes, blocks, is_other_part)
    return builder.spec(layers, tied_by_default=False, is_ignored=is_ignored)


def build_qwen3_next(hparams: HyperParameters) -> ModelSpec:
    """Qwen3-Next with experts. One matrix of a gated delta net has q, k, v and z of each key head in turn."""
    builder, blocks = _start(hparams, is_part=False)
    mixture, activation = (
        _mixtures(builder, hparams.boolean(None, "norm_topk_prob", default=True)),
        builder.activation(),
    )
    is_dense = read_dense_layers(hparams, builder.sizes)

    def feed_forward(index: int) -> AnyFeedForward:
        return builder.feed_forward(index, activation) if is_dense[index] else mixture(index)

    layers = _layers(builder, feed_forward, alternating=True)
    is_ignored = next_token_tensors(builder.sizes, blocks, is_unneeded)
    return builder.spec(layers, tied_by_default=False, is_ignored=is_ignored)


def _start(hparams: HyperParameters, *, is_part: bool) -> tuple[SpecBuilder, int]:
    sizes = read_dimensions(hparams, defaults={"head_dim": 256}, some_without_feed_forward=True)
    blocks = read_next_token_blocks(hparams, "mtp_num_hidden_layers")
    sizes = without_next_token_blocks(hparams, sizes, blocks)
    if is_part:
        read_vision_keys(hparams)
    _check_fixed_keys(hparams)
    builder = SpecBuilder(
        hparams,
        sizes,
        norm_weight_offset=1.0,
        prefix=text_prefix(hparams) if is_part else ("model.", ""),
        names=_GGUF_NAMES if hparams.is_gguf else SHARED_NAMES,
    )
    return builder, blocks


def _check_fixed_keys(hparams: HyperParameters) -> None:
    """Keys with one value in all models; those of next-token blocks say nothing of the layers that are run."""
    if not hparams.boolean(None, "attn_output_gate", default=True):
        raise hparams.unsupported(None, "attn_output_gate", False)
    for key, known in (("output_gate_type", ("swish", "silu")), ("mamba_ssm_dtype", ("float32",))):
        value = hparams.text(None, key, default=known[0])
        if value not in known:
            raise hparams.unsupported(None, key, value)
    hparams.boolean(None, "mtp_use_dedicated_embeddings", default=False)


def _layers(
    builder: SpecBuilder, feed_forward: BuildFeedForward, *, alternating: bool = False, tiled: bool = False
) -> list[Layer]:
    hparams, sizes = builder.hparams, builder.sizes
    delta_sizes = read_delta_sizes(hparams)
    rope = read_rope(hparams, sizes, has_axes=True, default_partial=0.25)
    is_attention = _read_attention_layers(hparams, sizes)
    first = is_attention.index(True) if True in is_attention else 0
    qkv_bias, output_bias = (builder.bias("attention_bias", f"self_attn.{part}_proj", layer=first) for part in "qo")
    return [
        Layer(
            mixer=builder.attention(
                index, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm="head", output_gate=True
            )
            if is_attention[index]
            else build_delta_net(builder, index, delta_sizes, alternating=alternating, tiled=tiled),
            feed_forward=feed_forward(index),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]


def _mixtures(builder: SpecBuilder, normalized: bool) -> BuildFeedForward:
    hparams, wide, activation = builder.hparams, builder.sizes.feed_forward_size, builder.activation()
    count = read_expert_count(hparams)
    per_token = read_experts_per_token(hparams, count)
    keys, shared_keys = (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    )
    # Where a GGUF file does not say, as llama.cpp has it; a configuration without the keys has the defaults of
    # transformers.
    of_file = wide // hparams.integer("expert_used_count", None, high=count, default=1)
    width = hparams.integer(*keys, high=MAX_FEED_FORWARD, default=(of_file or REQUIRED) if hparams.is_gguf else 512)
    shared = hparams.integer(
        *shared_keys, high=MAX_FEED_FORWARD, default=(wide or REQUIRED) if hparams.is_gguf else 512
    )  # fmt: skip

    def build(index: int) -> AnyFeedForward:
        experts = build_experts(
            builder, index, activation, count=count, per_token=per_token, width=width, normalized=normalized
        )
        part = build_shared(builder, index, activation, shared)
        return replace(experts, shared=part, shared_gate=build_shared_gate(builder, index))

    return build


def _read_attention_layers(hparams: HyperParameters, sizes: Dimensions) -> list[bool]:
    """A list says which layers are attention, those behind the model's among them, or else every fourth is."""
    keys = ("attention.recurrent_layers", "layer_types")
    stated, count = hparams.raw(*keys), sizes.num_layers
    period = hparams.integer("full_attention_interval", "full_attention_interval", high=MAX_LAYERS, default=_PERIOD)
    if stated is None:
        return [(index + 1) % period == 0 for index in range(count)]
    if isinstance(stated, str) or not hasattr(stated, "__len__") or len(stated) < count:
        raise hparams.malformed(*keys, f"expected a list of {count}, one per layer")
    if hparams.is_gguf:
        return [not flag for flag in stated][:count]
    if len(stated) != count:
        raise hparams.malformed(*keys, f"expected a list of {count}, one per layer")
    for kind in stated:
        if kind not in ("full_attention", "linear_attention"):
            raise hparams.unsupported(*keys, kind)
    return [kind == "full_attention" for kind in stated]
