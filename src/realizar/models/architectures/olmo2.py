"""OLMo 2 and 3: norms only after attention and feed-forward, and over all heads of Q and K. Standard library only.

OLMo 3 has windows in three of four layers, and scales rope (YaRN) only in the others. A GGUF file names both olmo2.
"""

from __future__ import annotations

from collections.abc import Sequence

from realizar.models.dimensions import MAX_CONTEXT, read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope_parameters import read_local_rope, read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION

_PERIOD = 4  # the last layer of each four is full


def build_olmo2(hparams: HyperParameters) -> ModelSpec:
    """OLMo 2; OLMo 3 from a GGUF file, which says so by its window."""
    if hparams.integer("attention.sliding_window", None, low=0, high=MAX_CONTEXT, default=0):
        return build_olmo3(hparams)
    builder = _start(hparams)
    count = builder.sizes.num_layers
    return _build(builder, [read_rope(hparams, builder.sizes)] * count, [None] * count)


def build_olmo3(hparams: HyperParameters) -> ModelSpec:
    builder = _start(hparams)
    default_base = 10000.0 if hparams.is_gguf else 500000.0
    everywhere = read_rope(hparams, builder.sizes, default_base=default_base)
    base = hparams.number("rope.freq_base", "rope_theta", default=default_base, above=1.0)
    local = read_local_rope(hparams, builder.sizes, base_key="rope_theta", default_base=base)
    is_local = builder.windowed_layers(lambda index: (index + 1) % _PERIOD != 0)
    windows = builder.windows(lambda index: is_local[index], default=4096)
    return _build(builder, [local if flag else everywhere for flag in is_local], windows)


def _start(hparams: HyperParameters) -> SpecBuilder:
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    return SpecBuilder(hparams, sizes, gguf_names=GGUF_POST_ATTENTION)


def _build(builder: SpecBuilder, ropes: Sequence[Rope], windows: Sequence[int | None]) -> ModelSpec:
    biases = builder.attention_biases()
    layers = builder.layers(
        lambda index: builder.attention(
            index, rope=ropes[index], window=windows[index], biases=biases, qk_norm="token"
        ),
        builder.feed_forward,
        norms="after",
    )
    return builder.spec(layers, tied_by_default=False)
