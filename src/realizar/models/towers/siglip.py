"""Towers whose positions are learned, as SigLIP's: those of Idefics 3 and SmolVLM, over tiles, of Gemma 3, of LFM2-VL,
and InternVL's with a class token and scaled layers. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.dimensions import MAX_WIDTH, Dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Linear, Norm
from realizar.models.spec import Layer
from realizar.models.tensor_source import TensorSource
from realizar.models.tower import Fitted, Grid, Projector, Stretched, Tiles, Tower
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

_LAYER_NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_NAMES = {
    "model.norm": "post_layernorm",
    "patches": "embeddings.patch_embedding",
    "positions": "embeddings.position_embedding",
}
_IDEFICS3_STARTS = ("model.vision_model.", "model.connector.")
_STARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_PREFIXES = ("vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower.")
_GGUF_STARTS = ("v.", "mm.")
# Of SmolVLM2's configurations, which leave out what is transformers' default; and what published ones repeat there.
_IDEFICS3_DEFAULTS = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 32,
}
_REPEATED = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")
_GEMMA3_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 16,
}
_LFM2_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_patches": 256,
    "patch_size": 16,
}
_LFM2_NAMES = {"projector.norm": "layer_norm", "projector.first": "linear_1", "projector.second": "linear_2"}
_LFM2_GGUF_NAMES = {"projector.norm": "mm.input_norm", "projector.first": "mm.1", "projector.second": "mm.2"}
_INTERNVL_LAYER_NAMES = {
    **{f"self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkv"},
    "self_attn.o_proj": "attention.projection_layer",
    "input_layernorm": "layernorm_before",
    "post_attention_layernorm": "layernorm_after",
}
_INTERNVL_GGUF_NAMES = {"projector.norm": "mm.0", "projector.first": "mm.1", "projector.second": "mm.3"}
_INTERNVL_DEFAULTS = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "image_size": 448,
    "patch_size": 14,
}
_INTERNVL_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_MOST_TILES = 64
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # Pillow's numbers


def build_idefics3(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "idefics3")
    sizes, patch_size = read_tower_sizes(hparams, _IDEFICS3_DEFAULTS, 1e-6)
    side = math.isqrt(sizes.vocab_size)
    whole = whole_parameters(hparams)
    merge = whole.integer("vision.projector.scale_factor", "scale_factor", high=side, default=2)
    if side % merge:
        raise whole.malformed("vision.projector.scale_factor", "scale_factor", f"{merge} does not divide {side}")
    builder = _start(
        hparams,
        sizes,
        "model.vision_model.",
        {"projector": "model.connector.modality_projection.proj"},
        {"projector": "mm.model.fc"},
    )
    first = builder.linear("projector", read_text_size(whole), sizes.hidden_size * merge**2, bias=False)
    preparation = _tiles(hparams, side * patch_size)
    for key in _REPEATED:
        hparams.raw(None, key)
    return _tower(builder, "idefics3", patch_size, merge, Projector(first), preparation, _IDEFICS3_STARTS)


def build_gemma3(checkpoint: Checkpoint) -> Tower:
    """Squares are averaged, and their norm is RMS; the matrix that follows lies transposed."""
    hparams = tower_parameters(checkpoint, "gemma3")
    sizes, patch_size = read_tower_sizes(hparams, _GEMMA3_DEFAULTS, 1e-6)
    side = math.isqrt(sizes.vocab_size)
    whole = whole_parameters(hparams)
    prefix = _prefix(checkpoint)
    start = "mm." if hparams.is_gguf else f"{prefix.partition('vision_tower.')[0]}multi_modal_projector.mm_"
    builder = _start(hparams, sizes, prefix, {}, {})
    text, hidden = read_text_size(whole), sizes.hidden_size
    stored = f"{start}input_projection{'.' if hparams.is_gguf else '_'}weight"
    first = builder.note("projector.weight", TensorSource(stored, (text, hidden), transposed=True))
    norm = builder.note("projector.norm.weight", TensorSource(f"{start}soft_emb_norm.weight", (hidden,)))
    projector = Projector(
        Linear(first, text, hidden),
        norm=Norm("rms", sizes.norm_eps, norm, weight_offset=0.0 if hparams.is_gguf else 1.0),
        reads="mean",
    )
    preparation, merge = _stretched(hparams, side * patch_size), _gemma3_merge(whole, side)
    return _tower(builder, "gemma3", patch_size, merge, projector, preparation, _STARTS, seen_whole=True)


def build_lfm2(checkpoint: Checkpoint) -> Tower:
    """SigLIP 2, whose positions are resized to pictures of any size; a converter has its patches as a convolution."""
    hparams = tower_parameters(checkpoint, "lfm2")
    sizes, patch_size = read_tower_sizes(hparams, _LFM2_DEFAULTS, 1e-6, {"image_size": "num_patches"})
    hparams.only(None, "vision_use_head", False)
    whole = whole_parameters(hparams)
    merge = whole.integer("vision.projector.scale_factor", "downsample_factor", high=16, default=2)
    whole.only(None, "vision_feature_layer", -1)
    whole.only(None, "projector_hidden_act", "gelu")
    prefix = _prefix(checkpoint)
    start = f"{prefix.partition('vision_tower.')[0]}multi_modal_projector."
    names = {name: start + stored for name, stored in _LFM2_NAMES.items()}
    builder = _start(hparams, sizes, prefix, names, _LFM2_GGUF_NAMES)
    width, text = sizes.hidden_size * merge**2, read_text_size(whole)
    if hparams.is_gguf:
        bias, has_norm = builder.has("projector.first.bias"), builder.has("projector.norm.weight")
        inner = checkpoint.tensors["mm.1.weight"].shape[0] if builder.has("projector.first.weight") else text
    else:
        bias = whole.boolean(None, "projector_bias", default=True)
        has_norm = whole.boolean(None, "projector_use_layernorm", default=True)
        inner = whole.integer(None, "projector_hidden_size", high=MAX_WIDTH, default=2560)
    projector = Projector(
        builder.linear("projector.first", inner, width, bias=bias),
        "gelu",
        builder.linear("projector.second", text, inner, bias=bias),
        norm=replace(builder.norm("projector.norm", width), eps=1e-5) if has_norm else None,
    )
    grid, most = _lfm2_grid(hparams, patch_size, merge)
    tower = _tower(builder, "lfm2", patch_size, merge, projector, grid, _STARTS, by_pixel=not hparams.is_gguf)
    return replace(tower, max_patches=most // patch_size**2, stretches="pixels")


def build_internvl(checkpoint: Checkpoint) -> Tower:
    hparams = tower_parameters(checkpoint, "internvl")
    sizes, patch_size = read_tower_sizes(hparams, _INTERNVL_DEFAULTS, 1e-6)
    side, whole = math.isqrt(sizes.vocab_size), whole_parameters(hparams)
    merge = whole.integer("vision.projector.scale_factor", None, high=side, default=_read_ratio(whole))
    if side % merge:
        raise whole.malformed("vision.projector.scale_factor", "downsample_ratio", f"{merge} does not divide {side}")
    _check_internvl_keys(hparams, whole)
    prefix = (
        "model.vision_tower." if "model.vision_tower.embeddings.cls_token" in checkpoint.tensors else "vision_tower."
    )
    builder = _internvl_builder(hparams, sizes, prefix)
    bias = builder.bias("attention_bias", "self_attn.q_proj")
    layers = builder.layers(
        lambda index: builder.attention(index, rope=None, biases=(bias, True)),
        lambda index: builder.feed_forward(index, ("c_fc", "c_proj"), bias=True),
    )
    width, text = sizes.hidden_size * merge**2, read_text_size(whole)
    tower = Tower(
        architecture="internvl",
        patch_size=patch_size,
        max_patches=sizes.vocab_size,
        side=side,
        merge=merge,
        hidden_size=sizes.hidden_size,
        patches=(builder.patches("patches", patch_size),),
        positions=_of_embeddings(builder, prefix, "position", (sizes.vocab_size + 1, sizes.hidden_size)),
        class_token=_of_embeddings(builder, prefix, "class", (sizes.hidden_size,)),
        layers=tuple(_scaled(builder, prefix, index, layer) for index, layer in enumerate(layers)),
        final_norm=None,
        projector=Projector(
            builder.linear("projector.first", text, width, bias=True),
            "gelu",
            builder.linear("projector.second", text, text, bias=True),
            norm=replace(builder.norm("projector.norm", width), eps=1e-5),
        ),
        preparation=_internvl_grid(hparams, side * patch_size),
        tensors=builder.tensors,
        ignored_tensors=frozenset(name for name in checkpoint.tensors if not name.startswith(_STARTS + _GGUF_STARTS)),
    )
    hparams.refuse_unread()
    return tower


def _internvl_builder(hparams: HyperParameters, sizes: Dimensions, prefix: str) -> TowerBuilder:
    """`prefix` is of the encoder's own tensors in safetensors."""
    start = f"{prefix.partition('vision_tower.')[0]}multi_modal_projector."
    return TowerBuilder(
        hparams,
        sizes,
        names=_LAYER_NAMES
        | _INTERNVL_LAYER_NAMES
        | {"patches": f"{prefix}embeddings.patch_embeddings.projection"}
        | {name: start + stored for name, stored in _LFM2_NAMES.items()},
        layers=f"{prefix}encoder.layer",
        gguf_names=_INTERNVL_GGUF_NAMES,
        default_activation=read_default_activation(hparams, "gelu"),
    )


def _check_internvl_keys(hparams: HyperParameters, whole: HyperParameters) -> None:
    """Keys with one value in the models that are read, and those of training."""
    for key, known in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
        whole.only(None, key, known)
    whole.only(None, "projector_hidden_act", "gelu")
    for key, flag in (("use_qk_norm", False), ("use_mask_token", False), ("use_mean_pooling", True)):
        hparams.only(None, key, flag)
    hparams.only(None, "norm_type", "layer_norm")
    hparams.only(None, "use_absolute_position_embeddings", True)
    for key in ("layer_scale_init_value", "projection_dropout", "initializer_factor"):
        hparams.raw(None, key)


def _read_ratio(whole: HyperParameters) -> int:
    """Patches of a square's edge, which configurations have as a share."""
    ratio = whole.number(None, "downsample_ratio", default=0.5, high=1.0)
    if (1 / ratio) % 1:
        raise whole.malformed(None, "downsample_ratio", f"{ratio} is not the share of a whole number")
    return int(1 / ratio)


def _of_embeddings(builder: TowerBuilder, prefix: str, name: str, shape: tuple[int, ...]) -> str:
    """A tensor beside those of layers, which safetensors have with axes of one before its own."""
    if builder.hparams.is_gguf:
        stored = "v.class_embd" if name == "class" else "v.position_embd.weight"
        return builder.note(f"{name}.weight", TensorSource(stored, shape))
    stored = f"{prefix}embeddings.{'cls_token' if name == 'class' else 'position_embeddings'}"
    return builder.note(f"{name}.weight", TensorSource(stored, shape, stored_shape=(1,) * (3 - len(shape)) + shape))


def _scaled(builder: TowerBuilder, prefix: str, index: int, layer: Layer) -> Layer:
    """With what multiplies the outputs of its attention and its feed-forward."""
    norms = []
    for number in (1, 2):
        name = (
            f"v.blk.{index}.ls{number}.weight"
            if builder.hparams.is_gguf
            else (f"{prefix}encoder.layer.{index}.lambda_{number}")
        )
        source = TensorSource(name, (builder.sizes.hidden_size,))
        norms.append(Norm("scale", 0.0, builder.note(f"model.layers.{index}.scale.{number}", source)))
    return replace(layer, post_mixer_norm=norms[0], post_feedforward_norm=norms[1])


def _prefix(checkpoint: Checkpoint) -> str:
    found = (each for each in _PREFIXES if f"{each}post_layernorm.weight" in checkpoint.tensors)
    return next(found, "vision_tower.")


def _start(
    hparams: HyperParameters,
    sizes: Dimensions,
    prefix: str,
    names: Mapping[str, str],
    gguf_names: Mapping[str, str],
) -> TowerBuilder:
    own = {name: prefix + stored for name, stored in _NAMES.items()}
    return TowerBuilder(
        hparams, sizes, names=_LAYER_NAMES | own | dict(names), layers=f"{prefix}encoder.layers", gguf_names=gguf_names
    )


def _tower(
    builder: TowerBuilder,
    architecture: str,
    patch_size: int,
    merge: int,
    projector: Projector,
    preparation: Tiles | Stretched | Grid,
    starts: tuple[str, ...],
    *,
    seen_whole: bool = False,
    by_pixel: bool = False,
) -> Tower:
    """A tower with a projector that was built. All tensors that begin with `starts` have to be known: a GGUF file has
    no others.
    """
    sizes, hparams = builder.sizes, builder.hparams
    layers = builder.layers(
        lambda index: builder.attention(index, rope=None, biases=(True, True)),
        lambda index: builder.feed_forward(index, ("c_fc", "c_proj"), bias=True),
    )
    own = starts + _GGUF_STARTS
    tower = Tower(
        architecture=architecture,
        patch_size=patch_size,
        max_patches=sizes.vocab_size,
        side=math.isqrt(sizes.vocab_size),
        merge=merge,
        hidden_size=sizes.hidden_size,
        patches=(builder.patches("patches", patch_size, by_pixel=by_pixel),),
        by_pixel=by_pixel,
        positions=builder.table("positions", sizes.vocab_size),
        layers=tuple(layers),
        final_norm=builder.norm("model.norm"),
        projector=projector,
        preparation=preparation,
        seen_whole=seen_whole,
        tensors=builder.tensors,
        ignored_tensors=frozenset(name for name in hparams.checkpoint.tensors if not name.startswith(own)),
    )
    hparams.only("use_gelu", None, True)
    hparams.refuse_unread()
    return tower


def _gemma3_merge(whole: HyperParameters, side: int) -> int:
    """Patches of the edge of a square, by which converters name it, and configurations the number of squares."""
    if whole.is_gguf:
        merge = whole.integer("vision.projector.scale_factor", None, high=side, default=4)
        if side % merge:
            raise whole.malformed("vision.projector.scale_factor", None, f"{merge} does not divide {side}")
        return merge
    count = whole.integer(None, "mm_tokens_per_image", high=side * side, default=256)
    squares = math.isqrt(count)
    if squares * squares != count or side % squares:
        raise whole.malformed(None, "mm_tokens_per_image", f"{count} are no squares of {side} x {side} patches")
    return side // squares


def _tiles(hparams: HyperParameters, tile: int) -> Tiles:
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


def _stretched(hparams: HyperParameters, edge: int) -> Stretched:
    own = processor_parameters(hparams, _BILINEAR)
    if not own.is_gguf:
        own.only(None, "do_pan_and_scan", False)
        size = part_of(own, "size")
        for key in ("height", "width"):
            if size.integer(None, key, high=MAX_EDGE) != edge:
                raise own.malformed(None, "size", f"expected {edge} pixels, the size of the tower's pictures")
    mean = read_colour(own, "vision.image_mean", "image_mean")
    return Stretched(edge, mean, read_colour(own, "vision.image_std", "image_std"))


def _lfm2_grid(hparams: HyperParameters, patch_size: int, merge: int) -> tuple[Grid, int]:
    """And the most pixels of a picture. What GGUF files do not say is as published processors and llama.cpp have it."""
    own, square = processor_parameters(hparams, _BILINEAR), patch_size * merge
    for key, known in (("do_image_splitting", True), ("use_thumbnail", True), ("use_image_special_tokens", True)):
        own.only(None, key, known)
    own.only(None, "downsample_factor", merge)
    own.only(None, "encoder_patch_size", patch_size)
    tile = own.integer("vision.preproc_image_size", "tile_size", high=MAX_EDGE, default=512)
    if tile % square:
        raise own.malformed("vision.preproc_image_size", "tile_size", f"{tile} pixels are no whole squares of {square}")
    fewest = own.integer("vision.preproc_min_tiles", "min_tiles", low=2, high=_MOST_TILES, default=2)
    most = own.integer("vision.preproc_max_tiles", "max_tiles", low=fewest, high=_MOST_TILES, default=10)
    pixels: list[int] = []
    for gguf, key, tokens in (("min", "min_image_tokens", 64), ("max", "max_image_tokens", 256)):
        if own.is_gguf:
            high = MAX_EDGE**2
            pixels.append(own.integer(f"vision.image_{gguf}_pixels", None, high=high, default=tokens * square**2))
        else:
            pixels.append(own.integer(None, key, high=MAX_EDGE, default=tokens) * square**2)
    mean, deviation = (read_colour(own, f"vision.image_{name}", f"image_{name}") for name in ("mean", "std"))
    tolerance = own.number(None, "max_pixels_tolerance", default=2.0)
    grids = tuple(sorted(set(_grids(fewest, most)), key=math.prod))  # equal numbers in a set's order, as there
    grid = Grid(tile, grids, pixels[1] * tolerance, Fitted(pixels[0], pixels[1], mean, deviation), "bilinear")
    return grid, max(tile**2, pixels[1])


def _internvl_grid(hparams: HyperParameters, tile: int) -> Grid:
    """A processor cuts images whatever its `crop_to_patches` says."""
    own = processor_parameters(hparams, _BICUBIC)
    size = part_of(own, "size")
    for key in ("height", "width"):
        if not own.is_gguf and size.integer(None, key, high=MAX_EDGE) != tile:
            raise own.malformed(None, "size", f"expected {tile} pixels, the size of the tower's pictures")
    fewest = own.integer("vision.preproc_min_tiles", "min_patches", high=_MOST_TILES, default=1)
    most = own.integer("vision.preproc_max_tiles", "max_patches", low=fewest, high=_MOST_TILES, default=12)
    mean = read_colour(own, "vision.image_mean", "image_mean", _INTERNVL_COLOURS[0])
    deviation = read_colour(own, "vision.image_std", "image_std", _INTERNVL_COLOURS[1])
    grids = tuple(sorted(sorted(set(_grids(fewest, most))), key=math.prod))
    return Grid(tile, grids, 0, Stretched(tile, mean, deviation), "bicubic")


def _grids(fewest: int, most: int) -> Iterator[tuple[int, int]]:
    """Columns and rows of all grids of so many tiles, some of them several times."""
    for count in range(fewest, most + 1):
        for columns in range(1, count + 1):
            yield from ((columns, rows) for rows in range(1, count + 1) if fewest <= columns * rows <= most)
