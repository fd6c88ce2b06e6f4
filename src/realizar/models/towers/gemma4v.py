"""The tower of Gemma 4: positions and rope of two axes, matrices with bounds, squares that are averaged. numpy only."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError
from realizar.models.dimensions import Dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Clamps, Linear, Rope
from realizar.models.rope import plain_frequencies
from realizar.models.spec import Attention
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.models.tower import Budgeted, Projector, Standard, Tower
from realizar.models.towers.builder import (
    TowerBuilder,
    part_of,
    processor_parameters,
    read_text_size,
    read_tower_sizes,
    tower_parameters,
    whole_parameters,
)
from realizar.quantization.tensors import tensor_source

_OWN = "model.vision_tower."
_MATRICES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NAMES = {
    **{name: f"{name}.linear" for name in _MATRICES},
    "patches": f"{_OWN}patch_embedder.input_proj",
    "projector": "model.embed_vision.embedding_projection",
}
_GGUF_NAMES = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "projector": "mm.input_projection",
}
_STARTS = (_OWN, "model.embed_vision.", "v.", "mm.")
_SOUND = "mm.a."
_KEYS = {"layer_norm_eps": "rms_norm_eps"}
_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "image_size": 224,  # converters write it, and no picture has it
    "patch_size": 16,
}
_POSITIONS, _MOST_TOKENS = 10240, 280
_MOST_MERGE, _MOST_PATCHES = 16, 1 << 14
_CAUSAL_SIZES = (1536, 2560)
"""Hidden sizes of E2B and E4B, in which tokens of an image do not see those after them; their files do not say so."""
_BICUBIC = 3  # Pillow's number
_HALF = (0.5, 0.5, 0.5)  # the model maps colours of 0 to 1 to -1 to 1 by itself


def build(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "gemma4v", beside_sound=True)
    sizes, patch_size = read_tower_sizes(hparams, _DEFAULTS, 1e-6, _KEYS)
    builder = _Builder(hparams, sizes)
    rope = _rope(hparams, sizes.head_size)
    layers = builder.layers(lambda index: _attention(builder, index, rope), builder.feed_forward, norms="both")
    merge = hparams.integer("vision.projector.scale_factor", "pooling_kernel_size", high=_MOST_MERGE, default=3)
    whole = whole_parameters(hparams)
    text = read_text_size(whole)
    side, positions = _positions(builder)
    preparation = _preparation(hparams, patch_size, merge)
    if preparation.patches // merge > side:
        table = f"tensor '{builder.tensors[positions].name}'"
        raise CheckpointError(checkpoint.path, table, f"{side} positions are too few for a picture's edge")
    tower = Tower(
        architecture="gemma4v",
        patch_size=patch_size,
        max_patches=preparation.patches,
        merge=merge,
        hidden_size=sizes.hidden_size,
        patches=(builder.patches("patches", patch_size, by_pixel=not hparams.is_gguf),),
        by_pixel=not hparams.is_gguf,
        positions=positions,
        layers=tuple(layers),
        final_norm=None,
        projector=Projector(
            builder.linear("projector", text, sizes.hidden_size, bias=False), standard=_standard(builder), reads="mean"
        ),
        preparation=preparation,
        side=side,
        by_axis=True,
        seen_whole=_is_seen_whole(whole, text),
        tensors=builder.tensors,
        ignored_tensors=frozenset(
            name
            for name in checkpoint.tensors
            if name in builder.bounds or not name.startswith(_STARTS) or name.startswith(_SOUND)
        ),
    )
    for key in ("max_position_embeddings", "default_output_length"):  # without effect on pictures
        hparams.raw(None, key)
    for key in ("head_dim", "global_head_dim"):
        hparams.only(None, key, sizes.head_size)
    hparams.only(None, "num_key_value_heads", sizes.num_heads)
    hparams.only("use_gelu", None, True)
    hparams.refuse_unread()
    return tower


class _Builder(TowerBuilder):
    """Matrices of layers have bounds, four tensors of one number beside each.

    Attributes:
        bounds: checkpoint names of these, which are read into the spec.
    """

    def __init__(self, hparams: HyperParameters, sizes: Dimensions) -> None:
        super().__init__(
            hparams,
            sizes,
            names=_NAMES,
            layers=f"{_OWN}encoder.layers",
            gguf_names=_GGUF_NAMES,
            norm_kind="rms",
            activation_key="hidden_activation",
        )
        self._has_bounds = hparams.is_gguf or hparams.boolean(None, "use_clipped_linears", default=False)
        self.bounds: set[str] = set()

    def linear(self, base: str, out_features: int, in_features: int, *, bias: bool) -> Linear:
        linear = super().linear(base, out_features, in_features, bias=bias)
        if not self._has_bounds or not base.startswith("model.layers."):
            return linear
        stored = self.stored_name(linear.weight).removesuffix(".weight").removesuffix(".linear")
        low, high = -math.inf, math.inf
        read = self._bound(f"{stored}.input_min", low), self._bound(f"{stored}.input_max", high)
        given = self._bound(f"{stored}.output_min", low), self._bound(f"{stored}.output_max", high)
        if (*read, *given) == (low, high, low, high):
            return linear
        return replace(linear, clamps=Clamps(read, given))

    def _bound(self, name: str, default: float) -> float:
        """A number of the checkpoint, which GGUF files may leave out."""
        tensor = self.hparams.checkpoint.tensors.get(name)
        if tensor is None:
            if self.hparams.is_gguf:
                return default
            raise CheckpointError(self.hparams.path, f"tensor '{name}'", "missing")
        self.bounds.add(name)
        values = tensor_source(self.hparams.checkpoint, name, 1).dequantize()
        if values.size != 1 or np.isnan(values).any():
            raise CheckpointError(tensor.path, f"tensor '{name}'", "expected one number")
        return values.item()


def _attention(builder: _Builder, index: int, rope: Rope) -> Attention:
    """Each half of a head is rotated as a head of its own, by the column and by the row: with the second and third
    quarters of heads of Q and K in each other's places that is one rotation of neox pairs.
    """
    attention = builder.attention(index, rope=rope, scale=1.0, qk_norm="head")
    size, quarter = attention.head_size, attention.head_size // 4
    order = [(place * quarter, (place + 1) * quarter) for place in (0, 2, 1, 3)]
    for part in (attention.q, attention.k, attention.q_norm, attention.k_norm):
        assert part is not None  # heads have norms here
        source = builder.tensors[part.weight]
        firsts = range(0, source.shape[0], size)
        builder.note(part.weight, source.cut([(at + start, at + stop) for at in firsts for start, stop in order]))
    return replace(attention, v_norm_eps=builder.sizes.norm_eps)


def _rope(hparams: HyperParameters, size: int) -> Rope:
    if size % 4:
        raise hparams.malformed("vision.attention.head_count", "num_attention_heads", f"head size {size} has no halves")
    base, given = 100.0, hparams.raw(None, "rope_parameters")
    if isinstance(given, dict):
        own = hparams.nested("rope_parameters", given)
        own.only(None, "rope_type", "axial", "default")
        base = own.number(None, "rope_theta", default=base, above=1.0)
    frequencies = tuple(plain_frequencies(base, size // 2).tolist())
    return Rope("neox", frequencies * 2, axes=(1,) * (size // 4) + (0,) * (size // 4))


def _positions(builder: _Builder) -> tuple[int, TensorName]:
    """Positions on each axis, and their table."""
    hparams, hidden = builder.hparams, builder.sizes.hidden_size
    side = hparams.integer(None, "position_embedding_size", high=1 << 20, default=_POSITIONS)
    name = f"{_OWN}patch_embedder.position_embedding_table"
    if hparams.is_gguf:
        name = "v.position_embd.weight"
        stored = hparams.checkpoint.tensors.get(name)
        side = stored.shape[1] if stored is not None and len(stored.shape) == 3 else side
    source = TensorSource(name, (2 * side, hidden), stored_shape=(2, side, hidden))
    return side, builder.note("positions.weight", source)


def _standard(builder: _Builder) -> Standard:
    hparams, sizes = builder.hparams, builder.sizes
    start = "v." if hparams.is_gguf else _OWN
    there = f"{start}std_bias" in hparams.checkpoint.tensors
    if not hparams.is_gguf:
        there = hparams.boolean(None, "standardize", default=False)
    shift, factor = (
        builder.note(name, TensorSource(f"{start}{name}", (sizes.hidden_size,))) if there else None
        for name in ("std_bias", "std_scale")
    )
    return Standard(math.sqrt(sizes.hidden_size), sizes.norm_eps, shift, factor)


def _is_seen_whole(whole: HyperParameters, text: int) -> bool:
    if whole.is_gguf:
        return text not in _CAUSAL_SIZES
    own = part_of(whole, "text_config")
    seen: bool = own.raw(None, "use_bidirectional_attention") == "vision"
    shared = own.raw(None, "num_kv_shared_layers")
    if seen and shared:
        raise own.unsupported(None, "num_kv_shared_layers", shared)  # attention over another layer's keys is causal
    return seen


def _preparation(hparams: HyperParameters, patch_size: int, merge: int) -> Budgeted:
    own = processor_parameters(hparams, _BICUBIC, normalizes=False)
    for key, neutral in (("vision.image_mean", 0.0), ("vision.image_std", 1.0)):
        value = own.raw(key, None)
        if value is not None and not np.array_equal(value, [neutral] * 3):
            raise own.unsupported(key, None, value)
    own.only(None, "patch_size", patch_size)
    own.only(None, "pooling_kernel_size", merge)
    tokens = own.integer(None, "max_soft_tokens", high=_MOST_PATCHES // merge**2, default=_MOST_TOKENS)
    return Budgeted(tokens * merge**2, _HALF, _HALF)
