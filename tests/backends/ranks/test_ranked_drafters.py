"""What drafts for a model that several processes compute, of which each has a part too: the texts of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.ranks.test_ranked_backend import run_all, texts_of
from models.drafting.assistant_files import write_assistant
from models.drafting.dflash_files import write_dflash
from models.drafting.eagle3_files import HeadCase, write_head
from models.drafting.next_token_files import write_file
from realizar.backends.select import plan_memory
from realizar.config import EngineConfig
from realizar.engine.draft_models import resolve_drafted
from realizar.engine.loading import find_checkpoint, load_core
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from tiny_model import write_tiny_model

pytest.importorskip("torch", reason="drafters' files are made by transformers, which needs torch")
pytest.importorskip("transformers", reason="drafters' files are made by transformers")

_CONFIG = EngineConfig(
    device="cpu", threads=2, context_length=96, max_running=4, max_step_tokens=40, kv_cache_bytes=4 << 20,
    prompt_lookup_min=90, prompt_lookup_max=90,
)  # fmt: skip
_SAMPLED = (
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, n=2),
    SamplingParams(temperature=0.0, prompt_logprobs=1),
)


def _block(folder: Path) -> tuple[Path, str]:
    return write_file("qwen35", folder, "gguf").path, "auto"


def _eagle3(folder: Path) -> tuple[Path, str]:
    file = write_head(HeadCase(), folder, "gguf")
    return file.model_path, str(file.path)


def _dflash(folder: Path) -> tuple[Path, str]:
    file = write_dflash(folder, "gguf")
    return file.model_path, str(file.path)


def _assistant(folder: Path) -> tuple[Path, str]:
    file = write_assistant("gemma4", folder, "gguf")
    return file.model_path, str(file.path)


def _requests() -> list[Request]:
    return [Request(f"r{index}", tuple(range(3, 50 + index)), params, 24) for index, params in enumerate(_SAMPLED)]


def _drafted(path: Path, ranks: int, drafter: str, requests: list[Request]) -> tuple[Any, int, int]:
    """Texts, drafts and those of them that were right. The plan counts all parts."""
    checkpoint, config = find_checkpoint(path), replace(_CONFIG, tensor_parallel=ranks, drafter=drafter)
    core = load_core(checkpoint, config, policy=Policy(measures_drafts=False))
    found, counts = texts_of(run_all(core, requests)), core.scheduler.counts
    core.close()
    drafted = resolve_drafted(checkpoint, config)
    plan = plan_memory(drafted.spec, checkpoint, drafted.config, others=drafted.others)
    assert (plan.beside_bytes > 0) is (drafter != "off")
    assert plan.weight_bytes <= core.capacity.weight_bytes <= plan.weight_bytes + plan.beside_bytes
    return found, counts.draft_tokens, counts.accepted_tokens


@pytest.mark.parametrize("write", [_block, _eagle3, _dflash, _assistant])
def test_ranks_draft_what_one_process_drafts(write: Callable[[Path], tuple[Path, str]], tmp_path: Path) -> None:
    """As many drafts, of which as many are right, and its texts."""
    path, drafter = write(tmp_path)
    (alone, *counts), (together, *of_both) = (_drafted(path, ranks, drafter, _requests()) for ranks in (1, 2))
    assert {key: tokens for key, (tokens, *_) in together.items()} == {key: each[0] for key, each in alone.items()}
    assert counts == of_both
    assert counts[0] > 30


def test_a_model_that_ranks_compute_foresees_itself_and_has_its_bits_without_drafts(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf")
    path, greedy = tmp_path / "tiny.gguf", _requests()[::2]
    drafted, drafts, right = _drafted(path, 2, str(path), greedy)
    assert drafts == right > 30
    assert drafted == _drafted(path, 2, "off", greedy)[0]
