"""`resolve_spans` gives each device of `layers_on` its layers and a configuration of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from realizar.backends.device_choice import choose_device
from realizar.backends.devices import ChosenDevice
from realizar.backends.resolved_config import LayerSpan, ResolvedConfig
from realizar.config import EngineConfig, read_layers_on
from realizar.errors import InvalidRequestError
from realizar.models.cut_layers import cut_layers
from realizar.models.spec import ModelSpec

Resolve = Callable[[ModelSpec, EngineConfig, ChosenDevice], ResolvedConfig]


def resolve_spans(spec: ModelSpec, config: EngineConfig, resolve: Resolve) -> ResolvedConfig:
    """The configuration of a model whose layers several devices compute.

    All steps go through every device, so that as many rows and tokens as the least of them has by default are in one,
    and the next begins when it has ended.

    Images are encoded beside all of them. `resolve` gives the configuration of a model on one device.

    Raises:
        InvalidRequestError: the devices are to have more or fewer layers than there are.
        UnsupportedModelError: the model can't be cut there; and as `choose_device`.
    """
    assert config.layers_on is not None
    named = read_layers_on(config.layers_on)
    chosen = [choose_device(name) for name, _ in named]
    ends = _ends([count for _, count in named], len(spec.layers))
    own = replace(config, layers_on=None, host_snapshot_bytes=0, mmproj="none")
    cuts = [(cut_layers(spec, first, stop), device) for (first, stop), device in zip(ends, chosen, strict=True)]
    each = [resolve(span, own, device) for span, device in cuts]
    rows, tokens = min(one.max_running for one in each), min(one.max_step_tokens for one in each)
    own = replace(own, max_running=rows, max_step_tokens=max(tokens, rows))
    each = [resolve(span, _with_part(own, span, spec), device) for span, device in cuts]
    spans = tuple(
        # Each keeps the stream after its last layer, the last one too: so none takes memory to read prompts aside.
        LayerSpan(first, stop, replace(one, hidden_layers=(stop - first - 1,)))
        for (first, stop), one in zip(ends, each, strict=True)
    )
    length, stretch = min(one.context_length for one in each), min(one.stretch for one in each)
    return replace(
        each[-1], layers_on=config.layers_on, mmproj=config.mmproj, spans=spans, steps_in_flight=1, stretch=stretch,
        context_length=length,
    )  # fmt: skip


def _with_part(config: EngineConfig, span: ModelSpec, spec: ModelSpec) -> EngineConfig:
    """With the part of the memory that is configured for keys and values of all layers."""
    if config.kv_cache_bytes is None:
        return config
    own, of_all = len(span.attentions()), len(spec.attentions())
    return replace(config, kv_cache_bytes=max(config.kv_cache_bytes * own // of_all, 1))


def _ends(counts: Sequence[int | None], layers: int) -> list[tuple[int, int]]:
    given = sum(count or 0 for count in counts)
    if given > layers - (None in counts) or (None not in counts and given != layers):
        some = "and a rest" if None in counts else "and no rest"
        message = f"layers_on gives out {given} layers {some}, and the model has {layers}"
        raise InvalidRequestError(message, "layers_on")
    ends, first = [], 0
    for count in counts:
        stop = first + (layers - given if count is None else count)
        ends.append((first, stop))
        first = stop
    return ends
