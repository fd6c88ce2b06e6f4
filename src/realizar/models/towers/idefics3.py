"""The tower of Idefics 3 and SmolVLM: SigLIP over tiles, and a projector over squares of patches. numpy only."""

from __future__ import annotations

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.tower import Projector, Tiles, Tower
from realizar.models.towers.builder import (
    MAX_EDGE,
    TowerBuilder,
    processor_parameters,
    read_colour,
    read_edge,
    read_text_size,
    read_tower_sizes,
    tower_parameters,
    whole_parameters,
)

_OWN = "model.vision_model."
_NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "model.norm": f"{_OWN}post_layernorm",
    "patches": f"{_OWN}embeddings.patch_embedding",
    "positions": f"{_OWN}embeddings.position_embedding",
    "projector": "model.connector.modality_projection.proj",
}
# Of SmolVLM2's configurations, which leave out what is transformers' default; and what published ones repeat there.
_DEFAULTS = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 32,
}
_REPEATED = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")
_LANCZOS = 1  # Pillow's number


def build(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "idefics3")
    sizes, patch_size = read_tower_sizes(hparams, _DEFAULTS, 1e-6)
    side = int(sizes.vocab_size**0.5)
    whole = whole_parameters(hparams)
    merge = whole.integer("vision.projector.scale_factor", "scale_factor", high=side, default=2)
    if side % merge:
        raise whole.malformed("vision.projector.scale_factor", "scale_factor", f"{merge} does not divide {side}")
    builder = TowerBuilder(
        hparams, sizes, names=_NAMES, layers=f"{_OWN}encoder.layers", gguf_names={"projector": "mm.model.fc"}
    )
    layers = builder.layers(
        lambda index: builder.attention(index, rope=None, biases=(True, True)),
        lambda index: builder.feed_forward(index, ("c_fc", "c_proj"), bias=True),
    )
    first = builder.linear("projector", read_text_size(whole), sizes.hidden_size * merge**2, bias=False)
    tower = Tower(
        architecture="idefics3",
        patch_size=patch_size,
        max_patches=sizes.vocab_size,
        side=side,
        merge=merge,
        hidden_size=sizes.hidden_size,
        patches=(builder.patches("patches", patch_size),),
        positions=builder.table("positions", sizes.vocab_size),
        layers=tuple(layers),
        final_norm=builder.norm("model.norm"),
        projector=Projector(first),
        preparation=_preparation(hparams, side * patch_size),
        tensors=builder.tensors,
        ignored_tensors=frozenset(name for name in checkpoint.tensors if not _is_of_tower(name)),
    )
    hparams.only("use_gelu", None, True)
    for key in _REPEATED:
        hparams.raw(None, key)
    hparams.refuse_unread()
    return tower


def _is_of_tower(name: str) -> bool:
    """True for tensors that a tower has to know: a GGUF file has no others."""
    return name.startswith((_OWN, "model.connector.", "v.", "mm."))


def _preparation(hparams: HyperParameters, tile: int) -> Tiles:
    own = processor_parameters(hparams, _LANCZOS)
    if own.is_gguf:
        edge = own.integer("vision.preproc_image_size", None, high=MAX_EDGE, default=4 * tile)
    else:
        own.only(None, "do_image_splitting", True)
        edge = read_edge(own, "size")
        if read_edge(own, "max_image_size") != tile:
            raise own.malformed(None, "max_image_size", f"expected {tile} pixels, the size of the tower's pictures")
    mean = read_colour(own, "vision.image_mean", "image_mean")
    return Tiles(edge, tile, mean, read_colour(own, "vision.image_std", "image_std"))
