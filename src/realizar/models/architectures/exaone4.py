"""EXAONE 4: norms only after attention and feed-forward, and on each head of Q and K; full layers do not rotate."""

from __future__ import annotations

from realizar.models.dimensions import MAX_CONTEXT, MAX_LAYERS, read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION

_PERIOD = 4  # the last layer of each four is full
_LAYERS_WITH_WINDOWS = 64  # of the published 32B model, of which llama.cpp knows the window without its key


def build(hparams: HyperParameters) -> ModelSpec:
    """EXAONE 4: the 32B model has windows and rotates only there; the 1.2B model has none and rotates everywhere."""
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes, gguf_names=GGUF_POST_ATTENTION)
    rope = read_rope(hparams, sizes)
    has_windows = _has_windows(hparams, sizes.num_layers)
    is_local = _read_local_layers(hparams, builder, has_windows=has_windows)
    windows = builder.windows(lambda index: is_local[index], default=4096 if has_windows else None)
    ropes = [rope if local or not has_windows else None for local in is_local]
    layers = builder.layers(
        lambda index: builder.attention(index, rope=ropes[index], window=windows[index], qk_norm="head"),
        builder.feed_forward,
        norms="after",
    )
    return builder.spec(layers, tied_by_default=False)


def _has_windows(hparams: HyperParameters, num_layers: int) -> bool:
    """True if any layer is made for a window, even one as long as the context; null says that none is."""
    keys = ("attention.sliding_window", "sliding_window")
    if hparams.is_present(*keys):
        return hparams.integer(*keys, low=0, high=MAX_CONTEXT, default=0) > 0
    return num_layers == _LAYERS_WITH_WINDOWS if hparams.is_gguf else True


def _read_local_layers(hparams: HyperParameters, builder: SpecBuilder, *, has_windows: bool) -> list[bool]:
    """`layer_types`, or else `sliding_window_pattern`: a period, or a text of L and G that is repeated."""
    key = "sliding_window_pattern"
    pattern = hparams.raw(None, key)
    if not has_windows:
        return [False] * builder.sizes.num_layers
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise hparams.malformed(None, key, "expected a text of L and G, or a number")
        return builder.windowed_layers(lambda index: pattern[index % len(pattern)] == "L")
    period = hparams.integer(None, key, high=MAX_LAYERS, default=_PERIOD)
    return builder.windowed_layers(lambda index: (index + 1) % period != 0)
