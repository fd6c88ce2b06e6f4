"""Qwen3-Next and Qwen3.5 to 3.8: most layers are a gated delta net, the others attention with an output gate.

`_read_delta_sizes` and `_build_delta_net` read the delta net as checkpoints hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from realizar.models.architectures.qwen import read_vision_keys, with_axes
from realizar.models.architectures.qwen_moe import SHARED_NAMES, read_dense_layers
from realizar.models.dimensions import (
    MAX_CONVOLUTION,
    MAX_FEED_FORWARD,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    Dimensions,
    read_dimensions,
)
from realizar.models.experts import Mixture, read_expert_counts, read_expert_width
from realizar.models.hyper_parameters import REQUIRED, HyperParameters
from realizar.models.mixers import GatedDeltaNet
from realizar.models.next_token import (
    apart_names,
    next_token_block,
    next_token_tensors,
    read_next_token_blocks,
    without_next_token_blocks,
)
from realizar.models.parts import Linear
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import AnyFeedForward, Attention, Mixer, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION

_PERIOD = 4  # layers, of which the last is attention


def build_qwen35(hparams: HyperParameters) -> ModelSpec:
    builder, blocks = _start(hparams, is_part=True)
    return _build(builder, blocks, builder.feed_forward, tiled=hparams.is_gguf)


def build_qwen35_mixture(hparams: HyperParameters) -> ModelSpec:
    """The text model of Qwen3.5, 3.6 and 3.8 with experts, whose weights are always divided by their sum."""
    builder, blocks = _start(hparams, is_part=True)
    hparams.only(None, "norm_topk_prob", True)
    mixture = _read_mixture(builder, normalized=True)
    return _build(builder, blocks, lambda index: mixture.build(builder, index), tiled=hparams.is_gguf)


def build_qwen3_next(hparams: HyperParameters) -> ModelSpec:
    """Qwen3-Next with experts. One matrix of a gated delta net has q, k, v and z of each key head in turn."""
    builder, blocks = _start(hparams, is_part=False)
    mixture = _read_mixture(builder, normalized=hparams.boolean(None, "norm_topk_prob", default=True))
    dense = {index for index, is_dense in enumerate(read_dense_layers(hparams, builder.sizes)) if is_dense}
    return _build(
        builder,
        blocks,
        lambda index: builder.feed_forward(index) if index in dense else mixture.build(builder, index),
        alternating=True,
    )


def _start(hparams: HyperParameters, *, is_part: bool) -> tuple[SpecBuilder, int]:
    """Also gives the number of next-token blocks."""
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
        is_part=is_part,
        names=SHARED_NAMES,
        gguf_names=GGUF_POST_ATTENTION,
        rename=apart_names(hparams, sizes),
    )
    return builder, blocks


def _check_fixed_keys(hparams: HyperParameters) -> None:
    """Keys with one value in all models, or of next-token blocks alone."""
    hparams.only(None, "attn_output_gate", True)
    hparams.only(None, "output_gate_type", "swish", "silu")
    hparams.only(None, "mamba_ssm_dtype", "float32")
    if hparams.boolean(None, "mtp_use_dedicated_embeddings", default=False) and hparams.drafts:
        raise hparams.unsupported(None, "mtp_use_dedicated_embeddings", True)


def _build(
    builder: SpecBuilder,
    blocks: int,
    feed_forward: Callable[[int], AnyFeedForward],
    *,
    alternating: bool = False,
    tiled: bool = False,
) -> ModelSpec:
    hparams, sizes = builder.hparams, builder.sizes
    delta_sizes = _read_delta_sizes(hparams)
    rope = with_axes(hparams, read_rope(hparams, sizes, has_axes=True, default_partial=0.25))
    is_attention = _read_attention_layers(hparams, sizes)
    first = is_attention.index(True) if True in is_attention else 0
    biases = builder.attention_biases(layer=sizes.num_layers if hparams.drafts else first)

    def attention(index: int) -> Attention:
        return builder.attention(index, rope=rope, biases=biases, qk_norm="head", output_gate=True)

    if hparams.drafts:
        return next_token_block(builder, blocks, attention, feed_forward, tied_by_default=False)

    def mixer(index: int) -> Mixer:
        if is_attention[index]:
            return attention(index)
        return _build_delta_net(builder, index, delta_sizes, alternating=alternating, tiled=tiled)

    layers = builder.layers(mixer, feed_forward)
    return builder.spec(layers, tied_by_default=False, is_ignored=next_token_tensors(sizes, blocks))


def _read_mixture(builder: SpecBuilder, *, normalized: bool) -> Mixture:
    """Where widths are missing, a GGUF file has them as in llama.cpp, and a configuration as in transformers."""
    hparams, wide = builder.hparams, builder.sizes.feed_forward_size
    count, per_token = read_expert_counts(hparams)
    of_file = wide // hparams.integer("expert_used_count", None, high=count, default=1)
    width = read_expert_width(hparams, default=(of_file or REQUIRED) if hparams.is_gguf else 512)
    shared = hparams.integer(
        "expert_shared_feed_forward_length",
        "shared_expert_intermediate_size",
        high=MAX_FEED_FORWARD,
        default=(wide or REQUIRED) if hparams.is_gguf else 512,
    )
    return Mixture(count, per_token, width, normalized, shared_width=shared, has_shared_gate=True)


def _read_attention_layers(hparams: HyperParameters, sizes: Dimensions) -> list[bool]:
    """A list says which layers are attention, those behind the model's among them, or else every fourth is."""
    key, count = "attention.recurrent_layers", sizes.num_layers
    period = hparams.integer("full_attention_interval", "full_attention_interval", high=MAX_LAYERS, default=_PERIOD)
    kinds = hparams.layer_types(count, "full_attention", "linear_attention")
    if kinds is not None:
        return [kind == "full_attention" for kind in kinds]
    flags = hparams.raw(key, None)
    if flags is None:
        return [(index + 1) % period == 0 for index in range(count)]
    if isinstance(flags, str) or not hasattr(flags, "__len__") or len(flags) < count:
        raise hparams.malformed(key, None, f"expected a list of {count}, one per layer")
    return [not flag for flag in flags][:count]


@dataclass(frozen=True, slots=True)
class _DeltaSizes:
    """Sizes of a model's gated delta nets; see `GatedDeltaNet`."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    length: int

    @property
    def ratio(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_size


def _read_delta_sizes(hparams: HyperParameters) -> _DeltaSizes:
    """Read and check the sizes, which a GGUF file has under the names of other recurrences.

    What a configuration leaves out is as in transformers.
    """

    def read(gguf: str, hf: str, high: int, default: int, low: int = 1) -> int:
        return hparams.integer(gguf, hf, low=low, high=high, default=REQUIRED if hparams.is_gguf else default)

    key_heads = read("ssm.group_count", "linear_num_key_heads", MAX_HEADS, 16)
    value_heads = read("ssm.time_step_rank", "linear_num_value_heads", MAX_HEADS, 32)
    key_size = read("ssm.state_size", "linear_key_head_dim", MAX_HEAD_SIZE, 128)
    if hparams.is_gguf:
        values = hparams.integer("ssm.inner_size", None, high=MAX_HEADS * MAX_HEAD_SIZE)
        if values % value_heads:
            raise hparams.malformed("ssm.inner_size", None, f"{value_heads} value heads do not divide {values} values")
        value_size = values // value_heads
    else:
        value_size = hparams.integer(None, "linear_value_head_dim", high=MAX_HEAD_SIZE, default=128)
    if value_heads % key_heads:
        raise hparams.malformed(
            "ssm.time_step_rank", "linear_num_value_heads",
            f"the {key_heads} key heads do not divide the {value_heads} value heads",
        )  # fmt: skip
    length = read("ssm.conv_kernel", "linear_conv_kernel_dim", MAX_CONVOLUTION, 4, low=2)
    return _DeltaSizes(key_heads, value_heads, key_size, value_size, length)


def _build_delta_net(
    builder: SpecBuilder, index: int, sizes: _DeltaSizes, *, alternating: bool, tiled: bool
) -> GatedDeltaNet:
    """The gated delta net of layer `index`; for `tiled` see `GatedDeltaNet`.

    Args:
        alternating: one matrix has q, k, v and z of each key head in turn, unless it is stored apart, and another one
            beta and decay; else q, k and v lie one below the other, and the others by themselves.
    """
    base = f"model.layers.{index}.linear_attn"
    q, k, v, z = _values(builder, base, sizes, alternating=alternating)
    beta, decay = _gates(builder, base, sizes, alternating=alternating)
    norm = replace(builder.norm(f"{base}.norm", sizes.value_size), weight_offset=0.0)
    return GatedDeltaNet(
        num_key_heads=sizes.num_key_heads,
        num_value_heads=sizes.num_value_heads,
        key_size=sizes.key_size,
        value_size=sizes.value_size,
        length=sizes.length,
        q=q,
        k=k,
        v=v,
        z=z,
        beta=beta,
        decay=decay,
        kernel=builder.kernel(f"{base}.conv1d", 2 * sizes.keys + sizes.values, sizes.length),
        decay_bias=builder.vector(index, "linear_attn.dt_bias", sizes.num_value_heads, gguf="ssm_dt.bias"),
        rate=builder.vector(index, "linear_attn.A_log", sizes.num_value_heads, gguf="ssm_a"),
        norm=norm,
        out=builder.linear(f"{base}.out_proj", builder.sizes.hidden_size, sizes.values, bias=False),
        rate_is_log=not builder.hparams.is_gguf,
        tiled=tiled,
    )


def _values(builder: SpecBuilder, base: str, sizes: _DeltaSizes, *, alternating: bool) -> list[Linear]:
    hidden, own = builder.sizes.hidden_size, sizes.ratio * sizes.value_size
    names = [f"{base}.in_proj_{part}" for part in "qkvz"]
    if alternating and not builder.has(f"{base}.in_proj_qkv.weight"):
        runs = (sizes.key_size, sizes.key_size, own, own)
        parts = list(zip(names, runs, strict=True))
        return builder.fused(f"{base}.in_proj_qkvz", parts, hidden, bias=False, count=sizes.num_key_heads)
    parts = list(zip(names[:3], (sizes.keys, sizes.keys, sizes.values), strict=True))
    z = builder.linear(names[3], sizes.values, hidden, bias=False)
    return [*builder.fused(f"{base}.in_proj_qkv", parts, hidden, bias=False), z]


def _gates(builder: SpecBuilder, base: str, sizes: _DeltaSizes, *, alternating: bool) -> list[Linear]:
    hidden, names = builder.sizes.hidden_size, [f"{base}.in_proj_{part}" for part in "ba"]
    if alternating:
        parts = [(name, sizes.ratio) for name in names]
        return builder.fused(f"{base}.in_proj_ba", parts, hidden, bias=False, count=sizes.num_key_heads)
    return [builder.linear(name, sizes.num_value_heads, hidden, bias=False) for name in names]
