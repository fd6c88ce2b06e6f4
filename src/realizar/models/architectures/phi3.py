"""Phi-3 and Phi-4: fused QKV and gate-up matrices, longrope, partial rotation. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """Phi-3: longrope's long or short factors are chosen by the context length against the original one."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    rope = read_rope(hparams, sizes)
    windows = builder.windows(lambda _: True)
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, window=windows[index]), builder.feed_forward
    )
    return builder.spec(layers, tied_by_default=False, head_bias=builder.bias("lm_head_bias", "lm_head"))
