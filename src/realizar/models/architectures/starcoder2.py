"""StarCoder2: LayerNorm, a feed-forward without gate, biases everywhere, a window. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import FeedForward, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """StarCoder2."""
    sizes = read_dimensions(hparams, eps_keys=("attention.layer_norm_epsilon", "norm_epsilon"))
    builder = SpecBuilder(hparams, sizes, norm_kind="layer", norm_bias=True)
    rope = read_rope(hparams, sizes)
    windows = builder.windows(lambda _: True)
    bias = builder.bias("use_bias", "self_attn.q_proj", default=not hparams.is_gguf)
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, window=windows[index], qkv_bias=bias, output_bias=bias),
            feed_forward=_feed_forward(builder, index, bias),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=True)


def _feed_forward(builder: SpecBuilder, index: int, bias: bool) -> FeedForward:
    hidden, width, base = builder.sizes.hidden_size, builder.sizes.feed_forward_size, f"model.layers.{index}.mlp"
    up = builder.linear(f"{base}.c_fc", width, hidden, bias=bias)
    down = builder.linear(f"{base}.c_proj", hidden, width, bias=bias)
    return FeedForward(builder.activation(default="gelu_tanh"), up, down)
