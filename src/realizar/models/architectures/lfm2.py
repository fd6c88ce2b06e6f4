"""LFM2, dense and with experts: most layers are a gated short convolution, the others attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from realizar.models.dimensions import (
    MAX_CONVOLUTION,
    MAX_FEED_FORWARD,
    MAX_LAYERS,
    MAX_WIDTH,
    Dimensions,
    read_dimensions,
)
from realizar.models.experts import Joined, Mixture, read_expert_counts, read_expert_width, read_scoring
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.mixers import ShortConvolution
from realizar.models.parts import Rope
from realizar.models.rope_parameters import plain_rope, read_rope
from realizar.models.spec import AnyFeedForward, Mixer, ModelSpec
from realizar.models.spec_builder import SpecBuilder

_CONFIG_NAMES = {
    "model.norm": "model.embedding_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "feed_forward.gate",
    "mlp.experts.0.gate_proj": "feed_forward.experts.0.w1",
    "mlp.experts.0.up_proj": "feed_forward.experts.0.w3",
    "mlp.experts.0.down_proj": "feed_forward.experts.0.w2",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_NAMES = {"model.norm": "token_embd_norm"}  # although it is the last norm
_JOINED = Joined("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")


def build(hparams: HyperParameters, *, is_part: bool = False) -> ModelSpec:
    """With `is_part` the text model of a vision model."""
    builder = _start(hparams, is_dense=True, is_part=is_part)
    return _build(builder, builder.feed_forward)


def build_mixture(hparams: HyperParameters) -> ModelSpec:
    """LFM2 with experts behind its first layers: sigmoids, whose bias does not weigh."""
    builder = _start(hparams, is_dense=False)
    leading = hparams.integer("leading_dense_block_count", "num_dense_layers", low=0, high=MAX_LAYERS, default=0)
    has_bias = hparams.boolean(None, "use_expert_bias", default=True)
    mixture = Mixture(
        *read_expert_counts(hparams),
        read_expert_width(hparams),
        normalized=hparams.boolean(None, "norm_topk_prob", default=True),
        scale=hparams.number(None, "routed_scaling_factor", default=1.0),  # a GGUF file can't say it
        scoring=read_scoring(hparams, "sigmoid"),
        selection_bias="feed_forward.expert_bias" if has_bias else None,
        joined=_JOINED,
    )
    return _build(
        builder,
        lambda index: builder.feed_forward(index) if index < leading else mixture.build(builder, index),
    )


def _start(hparams: HyperParameters, *, is_dense: bool, is_part: bool = False) -> SpecBuilder:
    sizes = read_dimensions(
        hparams,
        eps_keys=("attention.layer_norm_rms_epsilon", "norm_eps"),
        defaults={"intermediate_size": 12288, "norm_eps": 1e-5},
        some_without_attention=True,
    )
    if is_dense:
        width = _read_feed_forward_size(hparams, sizes.feed_forward_size)
        sizes = dataclasses.replace(sizes, feed_forward_size=width)
    return SpecBuilder(
        hparams, sizes, activation_key=None, is_part=is_part, names=_CONFIG_NAMES, gguf_names=_GGUF_NAMES
    )


def _build(builder: SpecBuilder, feed_forward: Callable[[int], AnyFeedForward]) -> ModelSpec:
    hparams, sizes = builder.hparams, builder.sizes
    rope = read_rope(hparams, sizes, default_base=10000.0 if hparams.is_gguf else 1e6)
    _check_repeated_keys(hparams, sizes, rope)
    is_attention = _read_attention_layers(hparams, sizes)
    length = hparams.integer("shortconv.l_cache", "conv_L_cache", low=2, high=MAX_CONVOLUTION)
    bias = hparams.boolean(None, "conv_bias", default=False)

    def mixer(index: int) -> Mixer:
        if is_attention[index]:
            return builder.attention(index, rope=rope, qk_norm="head")
        return _convolution(builder, index, length, bias=bias)

    layers = builder.layers(mixer, feed_forward)
    return builder.spec(layers, tied_by_default=_read_tied(hparams))


def _convolution(builder: SpecBuilder, index: int, length: int, *, bias: bool) -> ShortConvolution:
    channels, base = builder.sizes.hidden_size, f"model.layers.{index}.conv"
    return ShortConvolution(
        channels=channels,
        length=length,
        in_proj=builder.linear(f"{base}.in_proj", 3 * channels, channels, bias=bias),
        kernel=builder.kernel(f"{base}.conv", channels, length),
        out_proj=builder.linear(f"{base}.out_proj", channels, channels, bias=bias),
        bias=builder.vector(index, "conv.conv.bias", channels, gguf="shortconv.conv.bias") if bias else None,
    )


def _read_feed_forward_size(hparams: HyperParameters, stated: int) -> int:
    """`block_ff_dim`, or two thirds of it, rounded up, as `block_auto_adjust_ff_dim` says; GGUF has the result."""
    if hparams.is_gguf:
        return stated
    size = hparams.integer(None, "block_ff_dim", high=MAX_FEED_FORWARD, default=stated)
    multiple = hparams.integer(None, "block_multiple_of", high=MAX_WIDTH, default=256)
    factor = hparams.optional_number(None, "block_ffn_dim_multiplier")
    if not hparams.is_present(None, "block_ffn_dim_multiplier"):
        factor = 1.0
    if not hparams.boolean(None, "block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    if factor is not None:
        size = -(-int(factor * size) // multiple) * multiple
    if not 1 <= size <= MAX_FEED_FORWARD:
        raise hparams.malformed(None, "block_ffn_dim_multiplier", f"a feed-forward of {size}")
    return size


def _read_attention_layers(hparams: HyperParameters, sizes: Dimensions) -> list[bool]:
    """`layer_types` says which layers are attention, or else `full_attn_idxs`; in a GGUF file those with KV heads."""
    count = sizes.num_layers
    if hparams.is_gguf:
        return _read_layers_with_heads(hparams, count)
    indices = hparams.raw(None, "full_attn_idxs")
    if indices is not None and (
        not isinstance(indices, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in indices)
    ):
        raise hparams.malformed(None, "full_attn_idxs", "expected a list of layers")
    by_index = [indices is None or index in indices for index in range(count)]
    kinds = hparams.layer_types(count, "conv", "full_attention")
    if kinds is None:
        return by_index
    by_kind = [kind == "full_attention" for kind in kinds]
    if indices is not None and by_index != by_kind:
        raise hparams.malformed(None, "full_attn_idxs", "layer_types says otherwise")
    return by_kind


def _read_layers_with_heads(hparams: HyperParameters, count: int) -> list[bool]:
    heads = hparams.raw("attention.head_count_kv", None)
    if not hasattr(heads, "__len__"):
        return [True] * count
    if len(heads) != count:
        raise hparams.malformed("attention.head_count_kv", None, f"expected a list of {count}, one per layer")
    return [number != 0 for number in heads]


def _read_tied(hparams: HyperParameters) -> bool:
    tied = hparams.boolean(None, "tie_embedding", default=True)
    if hparams.boolean(None, "tie_word_embeddings", default=tied) != tied and hparams.is_present(None, "tie_embedding"):
        raise hparams.malformed(None, "tie_embedding", "tie_word_embeddings says otherwise")
    return tied


def _check_repeated_keys(hparams: HyperParameters, sizes: Dimensions, rope: Rope) -> None:
    """Published configurations repeat some values under a second name, which transformers does not read."""
    for key, expected in (
        ("block_dim", sizes.hidden_size),
        ("conv_dim", sizes.hidden_size),
        ("conv_dim_out", sizes.hidden_size),
        ("num_heads", sizes.num_heads),
        ("block_norm_eps", sizes.norm_eps),
        ("block_use_swiglu", True),
        ("use_pos_enc", True),
    ):
        hparams.only(None, key, expected)
    base = hparams.optional_number(None, "theta")
    if base is not None and (base <= 1 or plain_rope(base, rope.size) != rope):
        raise hparams.unsupported(None, "theta", base)
