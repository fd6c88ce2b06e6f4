"""Loading is strict both ways: the tensors of a spec are exactly those of the checkpoint. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.registry import require_weights
from realizar.models.spec import ModelSpec, TensorSource, out_feature_axis

_MAX_LISTED = 8


def check_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Compare the names and shapes of a spec's tensors with the checkpoint's.

    Raises:
        UnsupportedModelError: the checkpoint holds no weights, or a weight of an element type that has no ggml id.
        CheckpointError: tensors are missing, unexpected or of another shape; lists them.
    """
    require_weights(checkpoint)
    sources: dict[str, list[TensorSource]] = {}
    for source in spec.tensors.values():
        for name in source.names:
            sources.setdefault(name, []).append(source)
    for name, element_type in checkpoint.unsupported.items():
        if name in sources:
            raise UnsupportedModelError(f"{checkpoint.path}: tensor '{name}': unsupported element type {element_type}")
    missing = [name for name in sources if name not in checkpoint.tensors]
    extra = [name for name in checkpoint.tensors if name not in sources and name not in spec.ignored_tensors]
    misshaped = [
        f"{name} {checkpoint.tensors[name].shape} in place of {expected}"
        for name, parts in sources.items()
        if name in checkpoint.tensors and checkpoint.tensors[name].shape != (expected := _stored_shape(parts))
    ]
    problems = [
        f"{what} {_list(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("misshaped", misshaped))
        if names
    ]
    if problems:
        first = (missing + extra + misshaped)[0].split(" ")[0]
        raise CheckpointError(checkpoint.path, f"tensor '{first}'", "; ".join(problems))


def _stored_shape(parts: Sequence[TensorSource]) -> tuple[int, ...]:
    """The shape of the checkpoint tensor that holds these parts, one below the other."""
    first = parts[0]
    if first.stack:
        return first.shape[1:]
    if first.stored_shape is not None or not first.fused:
        return first.stored_shape or first.shape
    axis = out_feature_axis(first.shape)
    out_features = max(part.first_out_feature + part.shape[axis] for part in parts)
    return (*first.shape[:axis], out_features, *first.shape[axis + 1 :])


def _list(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED])
    return listed if len(names) <= _MAX_LISTED else f"{listed} and {len(names) - _MAX_LISTED} more"
