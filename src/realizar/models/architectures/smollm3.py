"""SmolLM3: a Llama without rope on every fourth layer. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import MAX_LAYERS, read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder

_DEFAULT_INTERVAL = 4


def build(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes)
    rope = read_rope(hparams, sizes, pairing="interleaved", default_base=10000.0 if hparams.is_gguf else 2e6)
    has_rope = _read_rope_layers(hparams, sizes.num_layers)
    ropes = [rope if flag else None for flag in has_rope]
    windows = _read_windows(hparams, builder, has_rope)
    biases, mlp_bias = builder.attention_biases(), builder.bias("mlp_bias", "mlp.down_proj")
    layers = builder.layers(
        lambda index: builder.attention(index, rope=ropes[index], window=windows[index], biases=biases),
        lambda index: builder.feed_forward(index, bias=mlp_bias),
    )
    return builder.spec(layers, tied_by_default=True)


def _read_rope_layers(hparams: HyperParameters, count: int) -> list[bool]:
    """True for layers that rotate, as in `no_rope_layers` in spite of its name; in a GGUF file all but every fourth."""
    interval = hparams.integer(None, "no_rope_layer_interval", high=MAX_LAYERS, default=_DEFAULT_INTERVAL)
    stated = hparams.raw(None, "no_rope_layers")
    if stated is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(stated, list) or len(stated) < count or any(flag not in (0, 1) for flag in stated):
        raise hparams.malformed(None, "no_rope_layers", f"expected a list of 0 and 1 for {count} layers")
    return [bool(flag) for flag in stated[:count]]


def _read_windows(hparams: HyperParameters, builder: SpecBuilder, has_rope: list[bool]) -> list[int | None]:
    """The layers without rope have a window where `use_sliding_window` is true, unless `layer_types` names others."""
    if hparams.boolean(None, "use_sliding_window", default=False):
        return builder.windows(lambda index: not has_rope[index])
    if not hparams.is_gguf and any(builder.windowed_layers(lambda _: False)):
        raise hparams.unsupported(None, "layer_types", "sliding_attention")
    return [None] * len(has_rope)
