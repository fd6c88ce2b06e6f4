"""The text model of Mistral 3 and Ministral 3: YaRN, and queries that grow with the position. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_query_growth, read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import HEAD

_WINDOWED = ("mistral", "mistral3")
"""Kinds of text model whose missing `sliding_window` is 4096; Mistral 3's own name stands for the first."""


def build(hparams: HyperParameters) -> ModelSpec:
    kind = hparams.text(None, "model_type", default="mistral")
    if kind not in (*_WINDOWED, "ministral3"):
        raise hparams.unsupported(None, "model_type", kind)
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes, is_part=True)
    rope = read_rope(hparams, sizes, pairing="interleaved")
    growth = read_query_growth(hparams, sizes)
    windows: list[int | None] = [None] * sizes.num_layers
    if not hparams.is_gguf:
        windows = builder.windows(lambda _: True, default=4096 if kind in _WINDOWED else None)
    scale = hparams.optional_number("attention.scale", None)
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, scale=scale, window=windows[index], query_growth=growth),
        builder.feed_forward,
    )
    return builder.spec(layers, tied_by_default=not builder.has(HEAD))
