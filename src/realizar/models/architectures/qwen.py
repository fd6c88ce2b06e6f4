"""Qwen2 (biases on Q, K and V) and Qwen3 (norms over each head of Q and K), also as text models of vision models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral

from realizar.models.dimensions import MAX_LAYERS, read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope_parameters import config_parameters, read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder

# Of configurations that hold the text model's keys beside those of vision.
_VISION_KEYS = (
    "image_token_id",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
)


def read_vision_keys(hparams: HyperParameters) -> None:
    """Keys that change nothing of text, to whose layers no image adds."""
    read_deepstack(hparams)
    for key in _VISION_KEYS:
        hparams.raw(None, key)


def read_deepstack(hparams: HyperParameters) -> int:
    """The number of layers after which features of images are added."""
    if hparams.is_gguf:
        return hparams.integer("n_deepstack_layers", None, low=0, high=MAX_LAYERS, default=0)
    config = hparams.checkpoint.metadata["config"].get("vision_config")
    listed = config.get("deepstack_visual_indexes") if isinstance(config, Mapping) else None
    return len(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else 0


def with_axes(hparams: HyperParameters, rope: Rope, *, interleaved: bool = True) -> Rope:
    """A rope of three axes, whose frequencies are in sections, one behind the other; where `interleaved` the axes take
    turns from frequency to frequency as far as each one's section goes.
    """
    own, keys = hparams if hparams.is_gguf else config_parameters(hparams), ("rope.dimension_sections", "mrope_section")
    own.only(None, "mrope_interleaved", interleaved)
    sections = own.raw(*keys)
    if sections is None:
        return rope
    if isinstance(sections, str) or not hasattr(sections, "__len__"):
        raise own.malformed(*keys, "expected a list")
    if len(sections) < 3 or any(isinstance(each, bool) or not isinstance(each, Integral) for each in sections):
        raise own.malformed(*keys, "expected three whole numbers")
    count = len(rope.inverse_frequencies)
    lengths = [int(section) for section in sections]
    if interleaved:
        axes = tuple(place % 3 if place < 3 * lengths[place % 3] else 0 for place in range(count))
    elif sum(lengths) != count or min(lengths) < 0:
        raise own.malformed(*keys, f"{lengths} are not sections of {count} frequencies")
    else:
        axes = tuple(axis for axis, length in enumerate(lengths) for _ in range(length))
    return replace(rope, axes=axes)


def build_internvl(hparams: HyperParameters) -> ModelSpec:
    """The text model of InternVL, which is Qwen2 or Qwen3."""
    hparams.only(None, "model_type", "qwen2", "qwen3")
    return build(hparams, qk_norm=hparams.raw(None, "model_type") == "qwen3", is_part=True, has_axes=False)


def build(hparams: HyperParameters, *, qk_norm: bool, is_part: bool = False, has_axes: bool | None = None) -> ModelSpec:
    """Qwen3 if there are norms of Q and K; with `is_part` the text model of a vision model, whose rope has axes unless
    `has_axes` says otherwise.
    """
    has_axes = is_part if has_axes is None else has_axes
    if has_axes:
        read_vision_keys(hparams)
    sizes = read_dimensions(hparams, defaults={"head_dim": 128} if qk_norm else None)
    builder = SpecBuilder(hparams, sizes, is_part=is_part)
    default_base = 10000.0 if hparams.is_gguf or not has_axes else 5e5 if qk_norm else 1e6
    rope = read_rope(hparams, sizes, default_base=default_base, has_axes=has_axes)
    if has_axes:
        rope = with_axes(hparams, rope, interleaved=qk_norm)
    windows = _read_windows(hparams, builder)
    qkv_bias = builder.bias("attention_bias" if qk_norm else None, "self_attn.q_proj", default=not qk_norm)
    output_bias = builder.bias("attention_bias" if qk_norm else None, "self_attn.o_proj")
    layers = builder.layers(
        lambda index: builder.attention(
            index,
            rope=rope,
            window=windows[index],
            biases=(qkv_bias, output_bias),
            qk_norm="head" if qk_norm else None,
        ),
        builder.feed_forward,
    )
    spec = builder.spec(layers, tied_by_default=False)
    return replace(spec, deepstack=read_deepstack(hparams)) if has_axes and qk_norm else spec


def _read_windows(hparams: HyperParameters, builder: SpecBuilder) -> list[int | None]:
    """Off unless `use_sliding_window`, then from layer `max_window_layers` on; in GGUF files only with a pattern."""
    count = builder.sizes.num_layers
    if hparams.is_gguf:
        if not hparams.is_present("attention.sliding_window_pattern", None):
            return [None] * count
        return builder.windows(lambda _: False)
    if not hparams.boolean(None, "use_sliding_window", default=False):
        return [None] * count
    first = hparams.integer(None, "max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return builder.windows(lambda index: index >= first, default=4096)
