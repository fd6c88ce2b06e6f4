"""`find_tower` finds the encoder of a model's images, in its own files or beside them. numpy only."""

from __future__ import annotations

from pathlib import Path

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import find_tower_file, open_checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec, build_tower
from realizar.models.tower import Tower


def usable_tower(checkpoint: Checkpoint, mmproj: str = "auto") -> tuple[tuple[Checkpoint, Tower] | None, str | None]:
    """As `find_tower`, of one that has all tensors; else, where it was not named, why it is not used."""
    try:
        found = find_tower(checkpoint, mmproj)
        if found is not None:
            check_tensors(found[1], found[0])
        return found, None
    except (CheckpointError, UnsupportedModelError) as error:
        if mmproj != "auto":
            raise
        return None, str(error)


def find_tower(checkpoint: Checkpoint, mmproj: str = "auto") -> tuple[Checkpoint, Tower] | None:
    """A model's tower and the checkpoint that has it, by `EngineConfig.mmproj`; None without one.

    Raises as `build_tower`, and UnsupportedModelError where a file has none, or that of another model.
    """
    if mmproj == "none":
        return None
    path = find_tower_file(checkpoint) if mmproj == "auto" else Path(mmproj)
    holder = checkpoint if path is None else open_checkpoint(path)
    tower = build_tower(holder)
    if tower is None and path is None:
        return None
    if tower is None:
        raise UnsupportedModelError(f"{path}: no encoder of images, but of architecture '{holder.architecture}'")
    _check_of_model(tower, holder, checkpoint)
    return holder, tower


def _check_of_model(tower: Tower, holder: Checkpoint, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError where a text model can't take a tower's features."""
    spec = build_spec(checkpoint)
    of_model = f"are not of {checkpoint.path.name}"
    if tower.projector.num_features != spec.hidden_size:
        features = f"features of {tower.projector.num_features} numbers"
        raise UnsupportedModelError(f"{holder.path}: {features} {of_model}, whose embeddings have {spec.hidden_size}")
    if len(tower.deepstack) != spec.deepstack:
        added = f"features that {len(tower.deepstack)} layers add"
        raise UnsupportedModelError(f"{holder.path}: {added} {of_model}, of which {spec.deepstack} do")
    if tower.spreads and not any(each.rope is not None and each.rope.axes for _, each in spec.attentions()):
        raise UnsupportedModelError(f"{holder.path}: positions on three axes {of_model}")
