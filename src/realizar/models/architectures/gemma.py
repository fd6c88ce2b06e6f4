"""Gemma 2 and the text model of Gemma 3: norms before and after, windows, scaled embedding. Standard library only."""

from __future__ import annotations

import math
from typing import Literal

from realizar.models.dimensions import Dimensions, read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope_parameters import plain_rope, read_local_rope, read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION

# Gemma 3's configurations inside multi-modal ones name only what differs from these.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}


def build_gemma2(hparams: HyperParameters) -> ModelSpec:
    """Gemma 2: every other layer windowed, beginning with the first."""
    sizes = read_dimensions(hparams, defaults={"head_dim": 256})
    builder = _start(hparams, sizes)
    rope = read_rope(hparams, sizes)
    local_base = hparams.number("rope.freq_base_swa", None, default=0.0, above=1.0)
    local = plain_rope(local_base, rope.size) if local_base else rope
    is_local = builder.windowed_layers(lambda index: index % 2 == 0)
    windows = builder.windows(lambda index: is_local[index], default=4096)
    # The published 27B model alone, with 46 layers, has a scale of its own; GGUF files do not say so.
    scale = _read_scale(hparams, sizes, is_scaled_by_width=sizes.num_layers == 46)
    soft_cap = _read_soft_cap(hparams, "attn_logit_softcapping", 50.0)
    layers = _layers(builder, [local if flag else rope for flag in is_local], windows, scale, soft_cap, None)
    final_soft_cap = _read_soft_cap(hparams, "final_logit_softcapping", 30.0)
    return builder.spec(
        layers, tied_by_default=True, embedding_scale=math.sqrt(sizes.hidden_size), logit_soft_cap=final_soft_cap
    )


def build_gemma3(hparams: HyperParameters) -> ModelSpec:
    """The text model of Gemma 3: five windowed layers, with a rope base of their own, to each full one."""
    sizes = read_dimensions(hparams, defaults=_GEMMA3_DEFAULTS)
    builder = _start(hparams, sizes, is_part=True)
    highest = sizes.num_layers + 1024
    period = hparams.integer(None, "_sliding_window_pattern", high=highest, default=6)  # as transformers 5 writes it
    period = hparams.integer(None, "sliding_window_pattern", high=highest, default=period)
    is_local = builder.windowed_layers(lambda index: (index + 1) % period != 0)
    windows = builder.windows(lambda index: is_local[index], default=None if hparams.is_gguf else 4096)
    everywhere = read_rope(hparams, sizes, default_base=1_000_000.0)
    local = read_local_rope(hparams, sizes, base_key="rope_local_base_freq", default_base=10000.0)
    scale = _read_scale(hparams, sizes, is_scaled_by_width=sizes.num_layers == 62)
    # Attention has no cap: norms of Q and K took its place. transformers knows the configuration's key and does not
    # apply it, so it is read here and not used; converters to GGUF refuse it.
    hparams.raw(None, "attn_logit_softcapping")
    layers = _layers(
        builder, [local if flag else everywhere for flag in is_local], windows, scale, None, "head", sees_images=True
    )
    final_soft_cap = _read_soft_cap(hparams, "final_logit_softcapping", None)
    return builder.spec(
        layers,
        tied_by_default=True,
        embedding_scale=math.sqrt(sizes.hidden_size),
        logit_soft_cap=final_soft_cap,
    )


def _start(hparams: HyperParameters, sizes: Dimensions, *, is_part: bool = False) -> SpecBuilder:
    return SpecBuilder(
        hparams,
        sizes,
        norm_weight_offset=1.0,
        activation_key="hidden_activation",
        default_activation="gelu_tanh",
        is_part=is_part,
        gguf_names=GGUF_POST_ATTENTION,
    )


def _layers(
    builder: SpecBuilder,
    ropes: list[Rope],
    windows: list[int | None],
    scale: float,
    soft_cap: float | None,
    qk_norm: Literal["head"] | None,
    *,
    sees_images: bool = False,
) -> list[Layer]:
    biases = builder.attention_biases()
    return builder.layers(
        lambda index: builder.attention(
            index,
            rope=ropes[index],
            scale=scale,
            window=windows[index],
            soft_cap=soft_cap,
            biases=biases,
            qk_norm=qk_norm,
            sees_images_whole=sees_images,
        ),
        builder.feed_forward,
        norms="both",
    )


def _read_scale(hparams: HyperParameters, sizes: Dimensions, *, is_scaled_by_width: bool) -> float:
    if not hparams.is_gguf:
        return 1.0 / math.sqrt(hparams.number(None, "query_pre_attn_scalar", default=256.0))
    stated = hparams.optional_number("attention.scale", None)
    size = sizes.hidden_size // sizes.num_heads if is_scaled_by_width else sizes.head_size
    return stated or 1.0 / math.sqrt(size)


def _read_soft_cap(hparams: HyperParameters, key: str, default: float | None) -> float | None:
    return hparams.optional_number(key, key) if hparams.is_present(key, key) else default
