"""StarCoder2: LayerNorm, a feed-forward without gate, biases everywhere, a window. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import Settings
from realizar.models.rope_settings import read_rope
from realizar.models.spec import FeedForward, Layer, ModelSpec
from realizar.models.spec_builder import Decoder


def build(settings: Settings) -> ModelSpec:
    """StarCoder2."""
    sizes = read_dimensions(settings, eps_keys=("attention.layer_norm_epsilon", "norm_epsilon"))
    decoder = Decoder(settings, sizes, norm_kind="layer", norm_bias=True)
    rope = read_rope(settings, sizes)
    windows = decoder.windows(lambda _: True)
    bias = decoder.bias("use_bias", "self_attn.q_proj", default=not settings.is_gguf)
    layers = [
        Layer(
            attention=decoder.attention(index, rope=rope, window=windows[index], qkv_bias=bias, output_bias=bias),
            feed_forward=_feed_forward(decoder, index, bias),
            input_norm=decoder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=decoder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return decoder.spec(layers, tied_by_default=True)


def _feed_forward(decoder: Decoder, index: int, bias: bool) -> FeedForward:
    hidden, width, base = decoder.sizes.hidden_size, decoder.sizes.feed_forward_size, f"model.layers.{index}.mlp"
    up = decoder.linear(f"{base}.c_fc", width, hidden, bias=bias)
    down = decoder.linear(f"{base}.c_proj", hidden, width, bias=bias)
    return FeedForward(decoder.activation(default="gelu_tanh"), up, down)
