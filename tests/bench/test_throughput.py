"""Rows of a mixture read as many experts as rows with texts of their own do, and drafts are right as often as asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from realizar.bench.throughput import DraftedSteps, DrawnDrafts, Work, measure_throughput
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError
from realizar.models.generated.generate import generate_gguf
from realizar.models.generated.shapes import SHAPES


def test_random_rows_read_experts_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPES["tiny-moe"], num_layers=8, num_experts=64, experts_per_token=4, vocab_size=4096)
    monkeypatch.setitem(SHAPES, "tiny-moe", shape)
    path = tmp_path / "model.gguf"
    generate_gguf("tiny-moe", path, "q4_k_m")
    config = EngineConfig(device="cpu", prefix_cache=False)
    results = measure_throughput(open_checkpoint(path), config, Work(4, 24, (1, 8, 32), 1), log=lambda _: None)
    assert [result.experts_by_chance for result in results] == pytest.approx([4, 25.8, 55.9], abs=0.05)
    for result in results:
        assert result.experts_read == pytest.approx(result.experts_by_chance, rel=0.05)


def test_steps_without_drafts_count_too() -> None:
    """Of 64 tokens one came beside another; of four rows' 40 tokens each so did 20 of each."""
    assert DraftedSteps(2, 6, (1,)).steps_of(64, 1) == 63
    assert DraftedSteps(60, 180, (50, 30)).steps_of(40, 4) == 20


def test_drawn_drafts_are_right_as_often_as_asked(tmp_path: Path) -> None:
    """A model of random weights, whose block is never right, keeps its texts and takes the drafts that are drawn."""
    generate_gguf("tiny-delta-mtp", tmp_path / "tiny.gguf", "q8_0")
    checkpoint, config = open_checkpoint(tmp_path / "tiny.gguf"), EngineConfig(threads=1, drafter="auto")
    work = Work(4, 120, (1, 2), 1, (0.75, 0.5, 0.25))
    for found in measure_throughput(checkpoint, config, work, log=lambda _: None):
        assert found.tokens_per_step == pytest.approx(2.5, abs=0.08)  # where chance would be wrong by 0.16
        assert found.acceptance == pytest.approx((0.75, 0.5, 0.25), abs=0.05)
        assert 0.4 < found.accepted_tokens / found.draft_tokens < 0.6
    alone, _ = measure_throughput(
        checkpoint, EngineConfig(threads=1), dataclasses.replace(work, acceptance=None), log=lambda _: None
    )
    assert (alone.tokens_per_step, alone.draft_tokens, alone.acceptance) == (None, 0, ())


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (1.2,), (0.5, 0.0)])
def test_shares_that_do_not_fall_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="acceptance must be shares that fall"):
        DrawnDrafts(rates)
