"""Arcee (AFM): Llama with a feed-forward of ReLU squared, without gate. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """Converters to GGUF reorder the rows of Q and K as Llama's."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes, default_activation="relu_squared")
    rope = read_rope(hparams, sizes, pairing="interleaved")
    scale = hparams.optional_number("attention.scale", None)
    biases, mlp_bias = builder.attention_biases(), builder.bias("mlp_bias", "mlp.down_proj")
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, scale=scale, biases=biases),
        lambda index: builder.feed_forward(index, ("up_proj", "down_proj"), bias=mlp_bias),
    )
    return builder.spec(layers, tied_by_default=False)
