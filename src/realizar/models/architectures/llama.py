"""Llama and the models of its kind (SmolLM2, TinyLlama), and Mistral. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import Settings
from realizar.models.rope_settings import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import Decoder


def build(settings: Settings) -> ModelSpec:
    """Llama. A GGUF file of this architecture with a sliding window is a Mistral: all its layers have the window."""
    sizes = read_dimensions(settings)
    decoder = Decoder(settings, sizes)
    # Converters to GGUF reorder the rows of Q and K so that rotated pairs are neighbours.
    rope = read_rope(settings, sizes, pairing="interleaved")
    if settings.is_gguf and rope.size != sizes.head_size:
        raise settings.unsupported("rope.dimension_count", None, rope.size)
    windows: list[int | None] = [None] * sizes.num_layers
    if settings.architecture == "mistral" or settings.is_gguf:
        windows = decoder.windows(lambda _: True, default=None if settings.is_gguf else 4096)
    scale = settings.optional_number("attention.scale", None)
    activation = decoder.activation()
    qkv_bias = decoder.bias("attention_bias", "self_attn.q_proj")
    output_bias = decoder.bias("attention_bias", "self_attn.o_proj")
    mlp_bias = decoder.bias("mlp_bias", "mlp.down_proj")
    layers = [
        Layer(
            attention=decoder.attention(
                index, rope=rope, scale=scale, window=windows[index], qkv_bias=qkv_bias, output_bias=output_bias
            ),
            feed_forward=decoder.feed_forward(index, activation, bias=mlp_bias),
            input_norm=decoder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=decoder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return decoder.spec(layers, tied_by_default=False)
