"""Drafters in files beside a model's, by names that repositories give them: `auto` takes one that suits the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hub.fake_hub import fake_hub
from models.drafting.assistant_files import write_assistant
from models.drafting.dflash_files import write_dflash
from models.drafting.eagle3_files import HeadCase, write_head
from models.drafting.next_token_files import write_file
from models.drafting.test_next_token_files import OPTIONS, answers
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.loading import load_core
from tiny_model import write_tiny_model

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")


def _block_alone(folder: Path) -> tuple[Path, Path]:
    """With vocabularies, which are compared; the model has a block of its own, which is taken out."""
    write_tiny_model(folder / "vocabulary.gguf")
    words = {
        key: value
        for key, value in open_checkpoint(folder / "vocabulary.gguf").metadata.items()
        if key.startswith("tokenizer.")
    }
    written = []
    for alone in (True, False):
        checkpoint = open_checkpoint(write_file("qwen35", folder / f"alone-{alone}", "gguf", alone=alone).path)
        layers = checkpoint.metadata["qwen35.block_count"] - 1
        tensors = [
            NewTensor(name, each.ggml_type, each.shape, each.data)
            for name, each in checkpoint.tensors.items()
            if alone or not name.startswith(f"blk.{layers}.")
        ]
        changes = {} if alone else {"qwen35.block_count": layers, "qwen35.nextn_predict_layers": 0}
        path = folder / f"written-{alone}.gguf"
        write_gguf(path, {**checkpoint.metadata, **words, **changes}, tensors)
        written.append(path)
    return written[0], written[1]


def _dflash(folder: Path) -> tuple[Path, Path]:
    file = write_dflash(folder, "gguf")
    return file.path, file.model_path


def _eagle3(folder: Path) -> tuple[Path, Path]:
    file = write_head(HeadCase(), folder, "gguf")
    return file.path, file.model_path


def _assistant(folder: Path) -> tuple[Path, Path]:
    file = write_assistant("gemma4", folder, "gguf")
    return file.path, file.model_path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("mtp-small.gguf", _block_alone), ("small-DFlash.gguf", _dflash), ("small-EAGLE3.gguf", _eagle3),
        ("small-assistant.gguf", _assistant), ("mtp-small-Q8_0.gguf", _assistant),
    ],
)  # fmt: skip
def test_auto_drafts_by_what_lies_beside_a_model(
    name: str, write: Callable[[Path], tuple[Path, Path]], tmp_path: Path
) -> None:
    drafter, model = write(tmp_path)
    (tmp_path / "repository").mkdir()
    beside = Path(shutil.copy(drafter, tmp_path / "repository" / name))
    checkpoint = open_checkpoint(shutil.copy(model, tmp_path / "repository" / "small-Q4_K_M.gguf"))
    plain = load_core(checkpoint, EngineConfig(**OPTIONS))
    drafted = load_core(checkpoint, EngineConfig(**OPTIONS, drafter="auto"))
    assert (drafted.config.drafter, drafted.capacity.num_drafts) == (str(beside), 3)
    assert answers(drafted) == answers(plain)
    assert drafted.scheduler.counts.draft_tokens > 30


def test_a_head_of_another_model_does_not_draft(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head, _ = _eagle3(tmp_path)
    write_tiny_model(tmp_path / "tiny.gguf")
    head.rename(tmp_path / "eagle3-head.gguf")
    core = load_core(open_checkpoint(tmp_path / "tiny.gguf"), EngineConfig(**OPTIONS, drafter="auto"))
    assert (core.config.drafter, core.capacity.num_drafts) == ("lookup", 0)
    core.close()
    (line,) = caplog.messages
    assert line.startswith("eagle3-head.gguf does not draft: ")


def test_a_plan_of_what_is_not_fetched_has_the_drafter(tmp_path: Path) -> None:
    """Its ids are read too, which say what its head drafts."""
    head, model = _eagle3(tmp_path)
    files = {"small-Q4_K_M.gguf": model.read_bytes(), "small-EAGLE3.gguf": head.read_bytes()}
    words = ("--device", "cpu", "--memory", "1G", "-c", "96", "--json")
    with fake_hub({"user/small": files}) as endpoint:
        plans = [
            json.loads(endpoint.run(tmp_path, "plan", "user/small", *words, *more).stdout)
            for more in (("--drafter", "auto"), ())
        ]
    assert [plan["drafter"] for plan in plans] == ["small-EAGLE3.gguf", None]
    assert plans[0]["beside_bytes"] > plans[1]["beside_bytes"] == 0
    assert [plan["file_bytes"] for plan in plans] == [model.stat().st_size] * 2
