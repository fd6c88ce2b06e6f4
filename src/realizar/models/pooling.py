"""The pooling that an embedding model was trained with. Standard library only."""

from __future__ import annotations

from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.file_json import read_json_object
from realizar.request import Pooling

# Of the values of `<architecture>.pooling_type` 0, 2 and 4 are not supported.
_GGUF_KINDS: dict[Any, Pooling] = {1: "mean", 3: "last"}
_FOLDER_KEYS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_MAX_BYTES = 1 << 16


def default_pooling(checkpoint: Checkpoint) -> Pooling | None:
    """GGUF's `pooling_type`, or that of a sentence-transformers folder's `1_Pooling/config.json`; None without either.

    Raises CheckpointError where that file is not strict JSON.
    """
    if checkpoint.format == "gguf":
        return _GGUF_KINDS.get(checkpoint.metadata.get(f"{checkpoint.architecture}.pooling_type"))
    path = checkpoint.path / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    config = read_json_object(path, _MAX_BYTES)
    chosen = [pooling for key, pooling in _FOLDER_KEYS.items() if config.get(key) is True]
    return chosen[0] if len(chosen) == 1 else None
