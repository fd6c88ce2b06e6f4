"""The tower of Mistral Small 3 and Ministral 3: two axes of rope, RMS norms, and a projector over squares of patches.

numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope import plain_frequencies
from realizar.models.tower import Projector, Tower, Whole
from realizar.models.towers.builder import (
    MAX_EDGE,
    TowerBuilder,
    part_of,
    processor_parameters,
    read_colour,
    read_default_activation,
    read_edge,
    read_text_size,
    read_tower_sizes,
    tower_parameters,
    whole_parameters,
)

_PREFIXES = ("", "model.")
_LAYER_NAMES = {
    **{f"self_attn.{name}_proj": f"attention.{name}_proj" for name in ("q", "k", "v", "o")},
    **{f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NAMES = {
    "patches": "vision_tower.patch_conv",
    "input_norm": "vision_tower.ln_pre",
    "model.norm": "multi_modal_projector.norm",
    "projector.reduction": "multi_modal_projector.patch_merger.merging_layer",
    "projector.first": "multi_modal_projector.linear_1",
    "projector.second": "multi_modal_projector.linear_2",
}
_GGUF_NAMES = {
    "input_norm": "v.pre_ln",
    "model.norm": "mm.input_norm",
    "projector.reduction": "mm.patch_merger",
    "projector.first": "mm.1",
    "projector.second": "mm.2",
}
_END_OF_ROW = "v.token_embd.img_break"
"""The text model's embedding of that token, which stands in the text model too."""
_DEFAULTS = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "image_size": 1540,
    "patch_size": 14,
}
_BICUBIC = 3  # Pillow's number
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def build(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "pixtral")
    sizes, patch_size = read_tower_sizes(hparams, _DEFAULTS, 1e-5)
    whole = whole_parameters(hparams)
    merge = whole.integer("vision.spatial_merge_size", "spatial_merge_size", high=16, default=1 if whole.is_gguf else 2)
    prefix = next((each for each in _PREFIXES if f"{each}vision_tower.ln_pre.weight" in checkpoint.tensors), "")
    builder = TowerBuilder(
        hparams,
        sizes,
        names=_LAYER_NAMES | {name: prefix + stored for name, stored in _NAMES.items()},
        layers=f"{prefix}vision_tower.transformer.layers",
        gguf_names=_GGUF_NAMES,
        norm_kind="rms",
        default_activation=read_default_activation(hparams, "gelu"),
    )
    rope = _rope(hparams, sizes.head_size)
    layers = builder.layers(lambda index: builder.attention(index, rope=rope), builder.feed_forward)
    preparation = _preparation(hparams)
    edge = -(-preparation.edge // (patch_size * merge)) * merge
    text = read_text_size(whole)
    biases = builder.has("projector.first.bias")
    tower = Tower(
        architecture="pixtral",
        patch_size=patch_size,
        max_patches=edge * edge,
        merge=merge,
        hidden_size=sizes.hidden_size,
        patches=(builder.patches("patches", patch_size),),
        positions=None,
        layers=tuple(layers),
        final_norm=replace(builder.norm("model.norm"), eps=_projector_eps(whole, sizes.norm_eps)),
        projector=Projector(
            builder.linear("projector.first", text, sizes.hidden_size, bias=biases),
            "gelu",
            builder.linear("projector.second", text, text, bias=biases),
            builder.linear("projector.reduction", sizes.hidden_size, sizes.hidden_size * merge**2, bias=False),
            reads="channels",
        ),
        preparation=preparation,
        input_norm=builder.norm("input_norm"),
        tensors=builder.tensors,
        ignored_tensors=frozenset(name for name in checkpoint.tensors if not _is_of_tower(name)),
    )
    whole.only(None, "vision_feature_layer", -1)
    whole.only(None, "projector_hidden_act", "gelu")
    hparams.refuse_unread()
    return tower


def _is_of_tower(name: str) -> bool:
    """True for tensors that a tower has to know: a GGUF file has but one other."""
    own = name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.", "v.", "mm."))
    return own and name != _END_OF_ROW


def _rope(hparams: HyperParameters, size: int) -> Rope:
    """The first half of a head's pairs is rotated by the row, and the other by the column.

    Of the plain frequencies of a head rows take every other one, and columns those between.
    """
    if size % 4:
        raise hparams.malformed("vision.attention.head_count", "num_attention_heads", f"head size {size} has no halves")
    own = hparams
    if isinstance(given := hparams.raw(None, "rope_parameters"), Mapping):
        own = hparams.nested("rope_parameters", given)
        own.only(None, "rope_type", "default", "axial")
    base = own.number("rope.freq_base", "rope_theta", default=10000.0, above=1.0)
    hparams.only(None, "head_dim", size)
    frequencies = plain_frequencies(base, size)
    ordered = (*frequencies[0::2].tolist(), *frequencies[1::2].tolist())
    return Rope("interleaved" if hparams.is_gguf else "neox", ordered, axes=(0,) * (size // 4) + (1,) * (size // 4))


def _projector_eps(whole: HyperParameters, eps: float) -> float:
    """Of the projector's norm: the text model's; a GGUF file has one for all."""
    return part_of(whole, "text_config").number(None, "rms_norm_eps", default=eps, high=1.0)


def _preparation(hparams: HyperParameters) -> Whole:
    own = processor_parameters(hparams, _BICUBIC)
    edge = own.integer("vision.image_size", None, high=MAX_EDGE) if own.is_gguf else read_edge(own, "size")
    mean = read_colour(own, "vision.image_mean", "image_mean", _MEAN)
    return Whole(edge, mean, read_colour(own, "vision.image_std", "image_std", _DEVIATION))
