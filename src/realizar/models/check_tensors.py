"""Loading is strict both ways: the tensors of a spec are exactly those of the checkpoint. numpy only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.registry import require_weights
from realizar.models.spec import LayerStack
from realizar.models.tensor_source import TensorSource
from realizar.quantization.layout import WeightLayout
from realizar.quantization.tensors import matrix_format, stack_layout, stored_names, tensor_layout, tensor_shape

_MAX_LISTED = 8


def check_tensors(spec: LayerStack, checkpoint: Checkpoint) -> None:
    """Compare the names and shapes of a spec's tensors with the checkpoint's.

    A tensor that nothing reads is unexpected, but for one of a type without ggml id where all weights are plain: there
    it is a mask or the like. A matrix format stores codes and scales in such types.

    Raises:
        UnsupportedModelError: no weights, or one of a type or a method that nothing reads, or experts of a layer of
            several types, or columns of a rank that are not whole blocks.
        CheckpointError: tensors are missing, unexpected or of another shape; lists them.
    """
    require_weights(checkpoint)
    stored = matrix_format(checkpoint)
    if stored is not None:
        stored.check(checkpoint)
    sources: dict[str, list[TensorSource]] = {}
    for source in spec.tensors.values():
        for name in source.names:
            sources.setdefault(name, []).append(source.whole or source)
    held = {name: stored_names(checkpoint, name) for name in (*sources, *spec.ignored_tensors)}
    missing = [each for name in sources for each in held[name] if each not in checkpoint.tensors]
    absent = set(missing)
    complete = {name: parts for name, parts in sources.items() if absent.isdisjoint(held[name])}
    for name in complete:
        tensor_layout(checkpoint, name)
    known = set(itertools.chain.from_iterable(held.values()))
    any_type = stored is not None
    extra = [
        name
        for name, tensor in checkpoint.tensors.items()
        if name not in known and (any_type or tensor.ggml_type is not None)
    ]
    misshaped = [
        f"{name} {shape} in place of {expected}"
        for name, parts in complete.items()
        if (shape := tensor_shape(checkpoint, name)) != (expected := _stored_shape(parts))
    ]
    problems = [
        f"{what} {_list(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("misshaped", misshaped))
        if names
    ]
    if problems:
        first = (missing + extra + misshaped)[0].split(" ")[0]
        raise CheckpointError(checkpoint.path, f"tensor '{first}'", "; ".join(problems))
    for source in spec.tensors.values():
        if source.stack or source.columns is not None:
            _check_borders(stack_layout(checkpoint, source.names), source, checkpoint)


def _check_borders(layout: WeightLayout, source: TensorSource, checkpoint: Checkpoint) -> None:
    """Refuse columns that do not begin and end with blocks, which several ranks would then need."""
    for start, stop in source.columns or ():
        if start % layout.block_size or stop % layout.block_size:
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {shown(source.name)} can't be shared so by ranks: columns {start} to {stop}"
                f" are not at borders of {layout.name} blocks, which hold {layout.block_size} columns"
            )


def _stored_shape(parts: Sequence[TensorSource]) -> tuple[int, ...]:
    first = parts[0]
    if first.stack:
        return first.shape[1:]
    if first.stored_shape is not None:
        return first.stored_shape
    axis = first.out_feature_axis
    shape = (*first.shape[:axis], max(part.last_out_feature for part in parts), *first.shape[axis + 1 :])
    return (*shape[:-2], shape[-1], shape[-2]) if first.transposed else shape


def _list(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED])
    return listed if len(names) <= _MAX_LISTED else f"{listed} and {len(names) - _MAX_LISTED} more"
