"""Checkpoints name the pooling of their hidden states into an embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError
from realizar.models.pooling import default_pooling


@pytest.mark.parametrize(("kind", "pooling"), [(None, None), (0, None), (1, "mean"), (2, None), (3, "last"), (4, None)])
def test_gguf(kind: int | None, pooling: str | None) -> None:
    metadata: dict[str, Any] = {"general.architecture": "qwen3", "llama.pooling_type": 1}
    if kind is not None:
        metadata["qwen3.pooling_type"] = kind
    assert default_pooling(Checkpoint(Path("model.gguf"), "gguf", metadata, {})) == pooling


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None),
    ],
)
def test_folder(tmp_path: Path, config: dict[str, bool], pooling: str | None) -> None:
    checkpoint = Checkpoint(tmp_path, "safetensors", {}, {})
    assert default_pooling(checkpoint) is None
    (tmp_path / "1_Pooling").mkdir()
    path = tmp_path / "1_Pooling" / "config.json"
    path.write_text(json.dumps(config))
    assert default_pooling(checkpoint) == pooling
    path.write_text("{")
    with pytest.raises(CheckpointError):
        default_pooling(checkpoint)
