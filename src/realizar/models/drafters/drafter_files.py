"""What drafters in files of their own share: keys, and the tensors that they take of their model's. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.spec import ModelSpec
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization.tensors import is_packed

IDS = "d2t"
"""The tensor of the ids that a head's rows stand for, where these are a part."""
_GGUF_NAMES = {"embed_tokens": "token_embd.weight", "lm_head": "output.weight"}


def config_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Of a folder; empty where it has none that is an object."""
    config = checkpoint.metadata.get("config")
    return config if isinstance(config, Mapping) else {}


def refuse_windows(hparams: HyperParameters, num_layers: int) -> None:
    """Raise UnsupportedModelError for layers with a window, whose keys are without effect for other architectures."""
    hparams.layer_types(num_layers, "full_attention")
    hparams.only(None, "use_sliding_window", False)


def has_head(checkpoint: Checkpoint) -> bool:
    return _file_name(checkpoint, "lm_head") in checkpoint.tensors


def with_model_tensors(checkpoint: Checkpoint, model: ModelSpec, of_model: Checkpoint) -> Checkpoint:
    """A drafter's checkpoint with the model's embedding and head where it has none of its own.

    Raises:
        UnsupportedModelError: the model has no plain ones, or multiplies its embedding.
        CheckpointError: the drafter has a list of ids, and no head for them.
    """
    taken: dict[str, StoredTensor] = {}
    name = _file_name(checkpoint, "embed_tokens")
    if name not in checkpoint.tensors:
        if model.embedding_scale != 1.0:
            raise UnsupportedModelError(
                f"{checkpoint.path}: it has no embedding of its own, and the model multiplies its own by"
                f" {model.embedding_scale:g}"
            )
        taken[name] = model_tensor(checkpoint, model, of_model, model.embedding)
    name = _file_name(checkpoint, "lm_head")
    if not has_head(checkpoint):
        if IDS in checkpoint.tensors:
            raise CheckpointError(checkpoint.path, f"tensor '{name}'", f"missing, for the ids of tensor '{IDS}'")
        if config_of(checkpoint).get("tie_word_embeddings") is not True:
            taken[name] = model_tensor(checkpoint, model, of_model, model.head.weight)
    return replace(checkpoint, tensors={**checkpoint.tensors, **taken})


def _file_name(checkpoint: Checkpoint, base: str) -> str:
    return _GGUF_NAMES[base] if checkpoint.format == "gguf" else f"{base}.weight"


def model_tensor(checkpoint: Checkpoint, model: ModelSpec, of_model: Checkpoint, name: TensorName) -> StoredTensor:
    """A tensor that a drafter takes of its model's. Raises UnsupportedModelError where that has no plain one."""
    source = model.tensors[name]
    if source != TensorSource(source.name, source.shape) or is_packed(of_model, source.name):
        raise UnsupportedModelError(f"{checkpoint.path}: it takes '{name}' of its model, which has no plain one")
    return of_model.tensors[source.name]
