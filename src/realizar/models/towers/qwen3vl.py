"""The tower of Qwen3-VL and Qwen3.5: learned positions, two axes of rope, features of several layers. numpy only."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope import plain_frequencies
from realizar.models.tower import Fitted, Projector, Tower
from realizar.models.towers.builder import (
    TowerBuilder,
    processor_parameters,
    read_colour,
    read_pixels,
    read_text_size,
    read_tower_sizes,
    tower_parameters,
    whole_parameters,
)

_OWN = "model.visual."
_NAMES = {
    "self_attn.qkv_proj": "attn.qkv",
    "self_attn.o_proj": "attn.proj",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
    "patches": f"{_OWN}patch_embed.proj",
    "positions": f"{_OWN}pos_embed",
    "model.norm": f"{_OWN}merger.norm",
    "projector.first": f"{_OWN}merger.linear_fc1",
    "projector.second": f"{_OWN}merger.linear_fc2",
}
_GGUF_NAMES = {"projector.first": "mm.0", "projector.second": "mm.2"}
_KEYS = {
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "image_size": "num_position_embeddings",
    "num_channels": "in_channels",
}
_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
}
_LEAST, _MOST = 1 << 16, 1 << 24  # pixels, of the published processor
_MOST_PATCHES = 1 << 14
_BICUBIC = 3  # Pillow's number


def build(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "qwen3vl_merger")
    sizes, patch_size = read_tower_sizes(hparams, _DEFAULTS, 1e-6, _KEYS)
    merge = hparams.integer("vision.spatial_merge_size", "spatial_merge_size", high=16, default=2)
    text = read_text_size(whole_parameters(hparams))
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

    frames = hparams.integer(None, "temporal_patch_size", high=16, default=2)
    patches = [builder.patches("patches", patch_size, None if hparams.is_gguf else frames)]
    if hparams.is_gguf:
        patches.append(builder.second_patches(patch_size))
    tower = Tower(
        architecture="qwen3vl_merger",
        patch_size=patch_size,
        max_patches=_MOST_PATCHES,
        merge=merge,
        hidden_size=sizes.hidden_size,
        patches=tuple(patches),
        positions=builder.table("positions", sizes.vocab_size),
        layers=tuple(layers),
        final_norm=builder.norm("model.norm"),
        projector=projector("projector", normed=False),
        preparation=_preparation(hparams, patch_size),
        side=int(sizes.vocab_size**0.5),
        stretches=True,
        deepstack=tuple((layer, projector(f"deepstack.{layer}", normed=True)) for layer in taken),
        spreads=True,
        tensors=builder.tensors,
        ignored_tensors=frozenset(name for name in checkpoint.tensors if not name.startswith((_OWN, "v.", "mm."))),
    )
    hparams.only("use_gelu", None, True)
    hparams.refuse_unread()
    return tower


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


def _preparation(hparams: HyperParameters, patch_size: int) -> Fitted:
    own = processor_parameters(hparams, _BICUBIC)
    own.only(None, "patch_size", patch_size)
    least = read_pixels(own, "vision.image_min_pixels", "shortest_edge", _LEAST)
    most = min(read_pixels(own, "vision.image_max_pixels", "longest_edge", _MOST), _MOST_PATCHES * patch_size**2)
    mean = read_colour(own, "vision.image_mean", "image_mean")
    return Fitted(least, most, mean, read_colour(own, "vision.image_std", "image_std"))
