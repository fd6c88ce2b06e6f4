"""Phi-3 and Phi-4: fused QKV and gate-up matrices, longrope, partial rotation. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import Settings
from realizar.models.rope_settings import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import Decoder


def build(settings: Settings) -> ModelSpec:
    """Phi-3: longrope's long or short factors are chosen by the context length against the original one."""
    sizes = read_dimensions(settings, defaults={"rms_norm_eps": 1e-5})
    decoder = Decoder(settings, sizes)
    rope = read_rope(settings, sizes)
    windows = decoder.windows(lambda _: True)
    activation = decoder.activation()
    layers = [
        Layer(
            attention=decoder.attention(index, rope=rope, window=windows[index]),
            feed_forward=decoder.feed_forward(index, activation),
            input_norm=decoder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=decoder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return decoder.spec(layers, tied_by_default=False, head_bias=decoder.bias("lm_head_bias", "lm_head"))
