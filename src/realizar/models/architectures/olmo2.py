"""OLMo 2 and 3: norms only after attention and feed-forward, and over all heads of Q and K. Standard library only.

OLMo 3 has windows in three of four layers, and scales rope (YaRN) only in the others. A GGUF file names both olmo2.
"""

from __future__ import annotations

from collections.abc import Sequence

from realizar.models.dimensions import MAX_CONTEXT, read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope_parameters import read_local_rope, read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder

_DEFAULTS = {"rms_norm_eps": 1e-5}
_PERIOD = 4  # the last layer of each four is full


def build_olmo2(hparams: HyperParameters) -> ModelSpec:
    """OLMo 2; OLMo 3 from a GGUF file, which says so by its window."""
    if hparams.integer("attention.sliding_window", None, low=0, high=MAX_CONTEXT, default=0):
        return build_olmo3(hparams)
    sizes = read_dimensions(hparams, defaults=_DEFAULTS)
    builder = SpecBuilder(hparams, sizes, norm_after_attention=True)
    count = sizes.num_layers
    return builder.spec(_layers(builder, [read_rope(hparams, sizes)] * count, [None] * count), tied_by_default=False)


def build_olmo3(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams, defaults=_DEFAULTS)
    builder = SpecBuilder(hparams, sizes, norm_after_attention=True)
    default_base = 10000.0 if hparams.is_gguf else 500000.0
    everywhere = read_rope(hparams, sizes, default_base=default_base)
    base = hparams.number("rope.freq_base", "rope_theta", default=default_base, above=1.0)
    local = read_local_rope(hparams, sizes, base_key="rope_theta", default_base=base)
    is_local = builder.windowed_layers(lambda index: (index + 1) % _PERIOD != 0)
    windows = builder.windows(lambda index: is_local[index], default=4096)
    return builder.spec(
        _layers(builder, [local if flag else everywhere for flag in is_local], windows), tied_by_default=False
    )


def _layers(builder: SpecBuilder, ropes: Sequence[Rope], windows: Sequence[int | None]) -> list[Layer]:
    activation = builder.activation()
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    return [
        Layer(
            mixer=builder.attention(
                index,
                rope=ropes[index],
                window=windows[index],
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm="token",
            ),
            feed_forward=builder.feed_forward(index, activation),
            post_mixer_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
            post_feedforward_norm=builder.norm(f"model.layers.{index}.post_feedforward_layernorm"),
        )
        for index in range(builder.sizes.num_layers)
    ]
