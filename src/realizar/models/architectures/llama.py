"""Llama and the models of its kind (SmolLM2, TinyLlama), and Mistral. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """Llama. A GGUF file of this architecture with a sliding window is a Mistral: all its layers have the window."""
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes)
    # Converters to GGUF reorder the rows of Q and K so that rotated pairs are neighbours.
    rope = read_rope(hparams, sizes, pairing="interleaved")
    if hparams.is_gguf and rope.size != sizes.head_size:
        raise hparams.unsupported("rope.dimension_count", None, rope.size)
    windows: list[int | None] = [None] * sizes.num_layers
    if hparams.architecture == "mistral" or hparams.is_gguf:
        windows = builder.windows(lambda _: True, default=None if hparams.is_gguf else 4096)
    scale = hparams.optional_number("attention.scale", None)
    activation = builder.activation()
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    mlp_bias = builder.bias("mlp_bias", "mlp.down_proj")
    layers = [
        Layer(
            mixer=builder.attention(
                index, rope=rope, scale=scale, window=windows[index], qkv_bias=qkv_bias, output_bias=output_bias
            ),
            feed_forward=builder.feed_forward(index, activation, bias=mlp_bias),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False)
