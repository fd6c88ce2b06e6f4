"""The towers of Qwen's models, and that of GLM-4.1V to 4.6V, which is like them: two axes of rope. That of Qwen3-VL and
Qwen3.5 has learned positions too, and gives features of several layers; most layers of Qwen2.5-VL's have windows; GLM's
has learned positions, and a feed-forward in its projector. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.dimensions import MAX_LAYERS
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Linear, Rope
from realizar.models.rope import plain_frequencies
from realizar.models.spec import FeedForward, Layer
from realizar.models.tower import Colour, Fitted, Projector, Tower
from realizar.models.towers.builder import (
    MAX_EDGE,
    TowerBuilder,
    processor_parameters,
    read_colour,
    read_default_activation,
    read_pixels,
    read_text_size,
    read_tower_sizes,
    tower_parameters,
    whole_parameters,
)

_OWN = "model.visual."
_PREFIXES = (_OWN, "visual.")
_OF_LAYERS = {
    "self_attn.qkv_proj": "attn.qkv",
    "self_attn.o_proj": "attn.proj",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
}
_NAMES = _OF_LAYERS | {
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
    "patches": f"{_OWN}patch_embed.proj",
    "positions": f"{_OWN}pos_embed",
    "model.norm": f"{_OWN}merger.norm",
    "projector.first": f"{_OWN}merger.linear_fc1",
    "projector.second": f"{_OWN}merger.linear_fc2",
}
_QWEN25_NAMES = {
    "patches": "patch_embed.proj",
    "model.norm": "merger.ln_q",
    "projector.first": "merger.mlp.0",
    "projector.second": "merger.mlp.2",
}
_GLM_NAMES = _OF_LAYERS | {
    "patches": f"{_OWN}patch_embed.proj",
    "input_norm": f"{_OWN}post_conv_layernorm",
    "positions": f"{_OWN}embeddings.position_embedding",
    "model.norm": f"{_OWN}post_layernorm",
    "projector.reduction": f"{_OWN}downsample",
    "projector.first": f"{_OWN}merger.proj",
    "projector.norm": f"{_OWN}merger.post_projection_norm",
    **{f"projector.{part}": f"{_OWN}merger.{part}_proj" for part in ("gate", "up", "down")},
}
_GLM_GGUF_NAMES = {
    "input_norm": "v.norm_embd",
    "projector.reduction": "mm.patch_merger",
    "projector.first": "mm.model.fc",
    "projector.norm": "mm.post_norm",
    **{f"projector.{part}": f"mm.{part}" for part in ("gate", "up", "down")},
}
_GGUF_NAMES = {"projector.first": "mm.0", "projector.second": "mm.2"}
_QWEN25_KEYS = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "num_channels": "in_channels"}
_KEYS = _QWEN25_KEYS | {"image_size": "num_position_embeddings"}
_GLM_KEYS = _QWEN25_KEYS | {"layer_norm_eps": "rms_norm_eps"}
_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
}
_QWEN25_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "image_size": 112,  # says nothing where no positions are learned
    "patch_size": 14,
}
_GLM_DEFAULTS = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13696,
    "num_heads": 12,
    "image_size": 336,
    "patch_size": 14,
}
_FULL_LAYERS = (7, 15, 23, 31)
_MOST_PATCHES = 1 << 14
_BICUBIC = 3  # Pillow's number


@dataclass(frozen=True, slots=True)
class _Published:
    """What a processor has where its configuration does not say; pixels, in configurations and in GGUF files.

    `of_frames`: a configuration's pixels are those of all frames, and images with short edges are enlarged first.
    """

    least: tuple[int, int]
    most: tuple[int, int]
    mean: Colour
    deviation: Colour
    of_frames: bool = False


_CLIP_COLOURS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_QWEN25 = _Published((3136, 3136), (1003520, 12845056), *_CLIP_COLOURS)
_GLM = _Published((112**2, 8 * 28**2), (15000 * 28**2, 4096 * 28**2), *_CLIP_COLOURS, of_frames=True)
_QWEN3 = _Published((1 << 16, 1 << 16), (1 << 24, 1 << 24), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def build_qwen25(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "qwen2.5vl_merger")
    sizes, patch_size = read_tower_sizes(hparams, _QWEN25_DEFAULTS, 1e-6, _QWEN25_KEYS)
    hparams.only(None, "in_chans", 3)
    hparams.only(None, "spatial_patch_size", patch_size)
    hparams.raw(None, "tokens_per_second")  # of videos
    merge, text = _read_merge(hparams), read_text_size(whole_parameters(hparams))
    hparams.only(None, "out_hidden_size", text)
    prefix = next((each for each in _PREFIXES if f"{each}merger.ln_q.weight" in checkpoint.tensors), _OWN)
    builder = TowerBuilder(
        hparams,
        sizes,
        names=_OF_LAYERS | {name: prefix + stored for name, stored in _QWEN25_NAMES.items()},
        layers=f"{prefix}blocks",
        gguf_names=_GGUF_NAMES,
        norm_kind="rms",
        default_activation=read_default_activation(hparams, "silu"),
    )
    rope, windows = _rope(hparams, sizes.head_size), _read_windows(hparams, sizes.num_layers, merge, patch_size)
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, window=windows[index], biases=(True, True)),
        lambda index: builder.feed_forward(index, bias=True),
    )
    width = sizes.hidden_size * merge**2
    first = builder.linear("projector.first", width, width, bias=True)
    projector = Projector(first, "gelu", builder.linear("projector.second", text, width, bias=True))
    return _tower(builder, "qwen2.5vl_merger", (patch_size, merge), layers, projector, prefix, _QWEN25)


def build_glm(checkpoint: Checkpoint) -> Tower:
    """Feed-forwards of layers are as wide as the text model, and that of the projector as configurations say."""
    hparams = tower_parameters(checkpoint, "glm4v")
    sizes, patch_size = read_tower_sizes(hparams, _GLM_DEFAULTS, 1e-5, _GLM_KEYS)
    merge, text = _read_merge(hparams), read_text_size(whole_parameters(hparams))
    hparams.only(None, "out_hidden_size", text)
    builder = TowerBuilder(
        hparams,
        sizes,
        names=_GLM_NAMES,
        layers=f"{_OWN}blocks",
        gguf_names=_GLM_GGUF_NAMES,
        norm_kind="rms",
        patch_bias=True,
        default_activation=read_default_activation(hparams, "silu"),
    )
    rope = _rope(hparams, sizes.head_size)
    qkv_bias = builder.bias("attention_bias", "self_attn.qkv_proj")
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, biases=(qkv_bias, False)),
        lambda index: builder.feed_forward(index, width=text),
    )
    width = sizes.feed_forward_size
    gate, up = (builder.linear(f"projector.{part}", width, text, bias=False) for part in ("gate", "up"))
    down = builder.linear("projector.down", text, width, bias=False)
    projector = Projector(
        builder.linear("projector.first", text, text, bias=False),
        "gelu",
        FeedForward(builder.activation, up, down, gate),
        builder.squares("projector.reduction", text, merge),
        inner_norm=builder.layer_norm("projector.norm", text, 1e-5),
        reads="channels",
    )
    return replace(
        _tower(builder, "glm4v", (patch_size, merge), layers, projector, _OWN, _GLM),
        input_norm=builder.norm("input_norm"),
        positions=builder.table("positions", sizes.vocab_size),
        side=math.isqrt(sizes.vocab_size),
        stretches="cubics",
    )


def build_qwen3(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "qwen3vl_merger")
    sizes, patch_size = read_tower_sizes(hparams, _DEFAULTS, 1e-6, _KEYS)
    merge, text = _read_merge(hparams), read_text_size(whole_parameters(hparams))
    hparams.only(None, "out_hidden_size", text)
    taken = _deepstack_layers(hparams, sizes.num_layers)
    names = {
        f"deepstack.{layer}.{ours}": f"{_OWN}deepstack_merger_list.{place}.{theirs}"
        for place, layer in enumerate(taken)
        for ours, theirs in (("norm", "norm"), ("first", "linear_fc1"), ("second", "linear_fc2"))
    }
    gguf_names = {
        f"deepstack.{layer}.{ours}": f"v.deepstack.{layer}.{theirs}"
        for layer in taken
        for ours, theirs in (("norm", "norm"), ("first", "fc1"), ("second", "fc2"))
    }
    builder = TowerBuilder(
        hparams, sizes, names=_NAMES | names, layers=f"{_OWN}blocks", gguf_names=_GGUF_NAMES | gguf_names
    )
    rope = _rope(hparams, sizes.head_size)
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, biases=(True, True)),
        lambda index: builder.feed_forward(index, ("c_fc", "c_proj"), bias=True),
    )
    width = sizes.hidden_size * merge**2

    def projector(base: str, *, normed: bool) -> Projector:
        first = builder.linear(f"{base}.first", width, width, bias=True)
        second = builder.linear(f"{base}.second", text, width, bias=True)
        return Projector(first, "gelu", second, norm=builder.norm(f"{base}.norm", width) if normed else None)

    hparams.only("use_gelu", None, True)
    tower = _tower(
        builder, "qwen3vl_merger", (patch_size, merge), layers, projector("projector", normed=False), _OWN, _QWEN3
    )
    return replace(
        tower,
        positions=builder.table("positions", sizes.vocab_size),
        side=math.isqrt(sizes.vocab_size),
        stretches="corners",
        deepstack=tuple((layer, projector(f"deepstack.{layer}", normed=True)) for layer in taken),
    )


def _tower(
    builder: TowerBuilder,
    architecture: str,
    edges: tuple[int, int],
    layers: Sequence[Layer],
    projector: Projector,
    prefix: str,
    published: _Published,
) -> Tower:
    """What all these towers have alike. `edges` are pixels of a patch and patches of a square; `prefix` is that of
    their tensors. UnsupportedModelError: a parameter was read by nothing.
    """
    hparams, (patch_size, merge) = builder.hparams, edges
    frames = hparams.integer(None, "temporal_patch_size", high=16, default=2)
    tower = Tower(
        architecture=architecture,
        patch_size=patch_size,
        max_patches=_MOST_PATCHES,
        merge=merge,
        hidden_size=builder.sizes.hidden_size,
        patches=_patches(builder, patch_size, frames),
        positions=None,
        layers=tuple(layers),
        final_norm=builder.norm("model.norm"),
        projector=projector,
        preparation=_preparation(hparams, patch_size, merge, frames, published),
        spreads=True,
        tensors=builder.tensors,
        ignored_tensors=_ignored(hparams.checkpoint, prefix),
    )
    hparams.refuse_unread()
    return tower


def _ignored(checkpoint: Checkpoint, prefix: str) -> frozenset[str]:
    """All tensors that are not a tower's, whose names begin with the prefix; a GGUF file has no others."""
    return frozenset(name for name in checkpoint.tensors if not name.startswith((prefix, "v.", "mm.")))


def _read_merge(hparams: HyperParameters) -> int:
    return hparams.integer("vision.spatial_merge_size", "spatial_merge_size", high=16, default=2)


def _patches(builder: TowerBuilder, patch_size: int, frames: int) -> tuple[Linear, ...]:
    if builder.hparams.is_gguf:
        return builder.patches("patches", patch_size), builder.second_patches(patch_size)
    return (builder.patches("patches", patch_size, frames),)


def _read_windows(hparams: HyperParameters, count: int, merge: int, patch_size: int) -> list[int | None]:
    """The window of each layer, in patches: whole squares. A GGUF file has a period, whose last layer sees all."""
    keys = ("vision.window_size", "window_size")
    pixels = hparams.integer(*keys, high=MAX_EDGE, default=112)
    if pixels < merge * patch_size:
        raise hparams.malformed(*keys, f"{pixels} pixels are less than a square of {merge} x {merge} patches")
    window = pixels // merge // patch_size * merge
    if hparams.is_gguf:
        period = hparams.integer("vision.n_wa_pattern", None, low=0, high=MAX_LAYERS)
        return [None if period == 0 or (index + 1) % period == 0 else window for index in range(count)]
    full = hparams.raw(None, "fullatt_block_indexes")
    listed = _FULL_LAYERS if full is None else full
    if not isinstance(listed, Sequence) or any(type(each) is not int for each in listed):
        raise hparams.malformed(None, "fullatt_block_indexes", "expected a list of layers")
    return [None if index in listed else window for index in range(count)]


def _deepstack_layers(hparams: HyperParameters, count: int) -> list[int]:
    flags = ("vision.is_deepstack_layers", "deepstack_visual_indexes")
    value: Any = hparams.raw(*flags)
    if value is None:
        return []
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise hparams.malformed(*flags, "expected a list")
    if not all(isinstance(each, Integral | np.bool_) for each in value):
        raise hparams.malformed(*flags, "expected whole numbers or flags")
    listed = [int(each) for each in value]
    layers = [place for place, flag in enumerate(listed) if flag] if hparams.is_gguf else listed
    if sorted(set(layers)) != layers or any(not 0 <= layer < count for layer in layers):
        raise hparams.malformed(*flags, f"expected layers of {count}, ascending")
    return layers


def _rope(hparams: HyperParameters, size: int) -> Rope:
    """The first half of a head's pairs is rotated by the row, and the other by the column, at the same frequencies."""
    if size % 4:
        raise hparams.malformed("vision.attention.head_count", "num_heads", f"head size {size} has no halves")
    given = hparams.raw(None, "rope_parameters")
    if isinstance(given, dict):
        own = hparams.nested("rope_parameters", given)
        own.only(None, "rope_type", "default", "axial")
        own.only(None, "rope_theta", 10000.0, 10000)
    frequencies = tuple(plain_frequencies(10000.0, size // 2).tolist())
    return Rope("neox", frequencies * 2, axes=(0,) * (size // 4) + (1,) * (size // 4))


def _preparation(hparams: HyperParameters, patch_size: int, merge: int, frames: int, published: _Published) -> Fitted:
    own = processor_parameters(hparams, _BICUBIC)
    for key, expected in (("patch_size", patch_size), ("merge_size", merge), ("temporal_patch_size", frames)):
        own.only(None, key, expected)
    of_file, bound = own.is_gguf, _MOST_PATCHES * patch_size**2
    least = read_pixels(own, "vision.image_min_pixels", "min_pixels", "shortest_edge", published.least[of_file])
    most = read_pixels(own, "vision.image_max_pixels", "max_pixels", "longest_edge", published.most[of_file])
    if published.of_frames and not of_file:
        if least % frames or most % frames:
            raise own.malformed(None, "size", f"expected whole pixels of each of {frames} frames")
        least, most = least // frames, most // frames
    mean = read_colour(own, "vision.image_mean", "image_mean", published.mean)
    deviation = read_colour(own, "vision.image_std", "image_std", published.deviation)
    return Fitted(least, min(most, bound), mean, deviation, widens=published.of_frames)
