"""A drafter's file beside its model's, opened as its loader does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec

Build = Callable[[Checkpoint, ModelSpec, Checkpoint], tuple[ModelSpec, Checkpoint]]


class DrafterFile(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def model_path(self) -> Path: ...


def opened_beside(build: Build, file: DrafterFile, changed: dict[str, Any]) -> tuple[ModelSpec, ModelSpec, Checkpoint]:
    """Its model, the drafter, and the drafter's checkpoint, of which fields are changed first."""
    of_model = open_checkpoint(file.model_path)
    model, drafter = build_spec(of_model), replace(open_checkpoint(file.path), **changed)
    spec, checkpoint = build(drafter, model, of_model)
    check_tensors(spec, checkpoint)
    return model, spec, checkpoint
