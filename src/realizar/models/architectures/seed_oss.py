"""Seed-OSS: Llama with biases on Q, K and V, and heads of 128. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION


def build(hparams: HyperParameters) -> ModelSpec:
    """A GGUF file names the norm before the feed-forward as if it followed attention."""
    sizes = read_dimensions(hparams, defaults={"head_dim": 128, "rms_norm_eps": 1e-6})
    builder = SpecBuilder(hparams, sizes, gguf_names=GGUF_POST_ATTENTION)
    rope = read_rope(hparams, sizes)
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj", default=not hparams.is_gguf)
    output_bias = builder.bias("attention_out_bias", "self_attn.o_proj")
    mlp_bias = builder.bias("mlp_bias", "mlp.down_proj")
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, biases=(qkv_bias, output_bias)),
        lambda index: builder.feed_forward(index, bias=mlp_bias),
    )
    return builder.spec(layers, tied_by_default=False)
