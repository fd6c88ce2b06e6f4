"""`cut_layers` cuts the description of a model into spans of layers, which devices compute one after another.

A span begins with the residual stream that the one before it ends with, given in place of embeddings. All spans have
the embedding, the final norm and a head; of the head all but the last have a few rows, which no answer depends on.
Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from realizar.errors import UnsupportedModelError
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Layer, ModelSpec
from realizar.models.tensor_source import TensorName

_HEAD_ROWS = 32
_HEAD = TensorName("head of a span")


def cut_layers(spec: ModelSpec, first: int, stop: int) -> ModelSpec:
    """The span of a whole model's layers from `first` to before `stop`.

    Raises UnsupportedModelError where its layers read more of others than the stream; names the architecture and the
    layer.
    """
    if not 0 <= first < stop <= len(spec.layers):
        raise ValueError(f"layers {first} to {stop} of {len(spec.layers)}")
    if (first, stop) == (0, len(spec.layers)):
        return spec
    if spec.layer_inputs is not None:
        raise UnsupportedModelError(f"{spec.architecture}: layers have inputs of their own, which one device computes")
    if 0 < first < spec.deepstack or stop < spec.deepstack:
        raise UnsupportedModelError(
            f"{spec.architecture}: features of images are added to the first {spec.deepstack} layers, which one device"
            " computes"
        )
    layers = tuple(_moved(spec, index, first) for index in range(first, stop))
    span = replace(spec, layers=layers, deepstack=0 if first else spec.deepstack)
    if not span.attentions():
        raise UnsupportedModelError(
            f"{spec.architecture}: none of layers {first} to {stop - 1} has attention, which each device needs"
        )
    if stop < len(spec.layers):
        span = _with_short_head(span)
    span = span.with_own_tensors()
    own = {name for source in span.tensors.values() for name in source.names}
    others = {name for source in spec.tensors.values() for name in source.names} - own
    return replace(span, ignored_tensors=spec.ignored_tensors | others)


def _moved(spec: ModelSpec, index: int, first: int) -> Layer:
    """A layer as one of a span that begins with layer `first`."""
    layer = spec.layers[index]
    if not isinstance(layer.mixer, SharedAttention):
        return layer
    if layer.mixer.source < first:
        raise UnsupportedModelError(
            f"{spec.architecture}: layer {index} reads the keys and values of layer {layer.mixer.source}, which another"
            " device has"
        )
    return replace(layer, mixer=replace(layer.mixer, source=layer.mixer.source - first))


def _with_short_head(span: ModelSpec) -> ModelSpec:
    rows = min(_HEAD_ROWS, span.head.out_features)
    head = replace(span.head, weight=_HEAD, out_features=rows, bias=None)
    tensors = {**span.tensors, _HEAD: span.tensors[span.head.weight].cut(rows=[(0, rows)])}
    return replace(span, vocab_size=rows, head=head, tensors=tensors)
