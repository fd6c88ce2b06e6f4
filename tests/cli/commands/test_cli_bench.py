"""`realizar bench`: the JSON that scripts read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realizar.bench.throughput import Work, measure_throughput
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig


def test_json_is_all_of_stdout_and_has_every_field(realizar: Callable[..., Any], weights_only: Path) -> None:
    words = (
        "--prompt-tokens",
        "40",
        "--gen-tokens",
        "6",
        "--batch",
        "1,3",
        "--threads",
        "1",
        "--repeats",
        "2",
        "--json",
    )
    result = realizar("bench", weights_only, *words)
    assert result.status == 0, result.stderr
    results = json.loads(result.stdout)["results"]
    assert [entry["batch"] for entry in results] == [1, 3]
    for entry in results:
        assert set(entry) == {
            "batch",
            "prefill_tokens_per_s",
            "decode_tokens_per_s",
            "load_s",
            "peak_memory_bytes",
            "device_memory_bytes",
            "weight_bytes_per_token",
            "achieved_gb_per_s",
            "experts_read",
            "experts_by_chance",
            "tokens_per_step",
            "draft_tokens",
            "accepted_tokens",
            "acceptance",
        }
        for phase in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            spread = entry[phase]
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        steps_per_s = entry["decode_tokens_per_s"]["median"] / entry["batch"]
        assert entry["achieved_gb_per_s"] == pytest.approx(steps_per_s * entry["weight_bytes_per_token"] / 1e9)
        assert entry["weight_bytes_per_token"] > 0.9 * 0.5 * 256 * 512  # at least the four-bit head
        assert entry["peak_memory_bytes"] > 1 << 20


def test_a_generated_shape(realizar: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written once, and then found again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("--generate", "--device", "cpu", "--prompt-tokens", "8", "--gen-tokens", "2", "--repeats", "1")
    for is_new in (True, False):
        result = realizar("bench", "tiny-moe", *words)
        assert result.status == 0, result.stderr
        assert "decode tok/s" in result.stdout
        assert ("writing " in result.stderr) == is_new
        assert "  2.0 experts a layer, by chance 2.0" in result.stdout
    refused = realizar("bench", "olmoe-7b", *words, "--instruction-set", "none")
    assert refused.status != 0
    assert [each.name for each in (tmp_path / "realizar" / "bench").iterdir()] == ["tiny-moe-q4_k_m.gguf"]
    result = realizar("bench", "tiny-moe", *words, "--skew", "1", "--batch", "4", "--json")
    [entry] = json.loads(result.stdout)["results"]
    assert 2 <= entry["experts_read"] <= 8
    assert entry["experts_by_chance"] == pytest.approx(8 * (1 - 0.75**4))
    assert (tmp_path / "realizar" / "bench" / "tiny-moe-skew-1-q4_k_m.gguf").is_file()
    for options, message in (
        (("tiny", *words, "--skew", "1"), "the shape tiny has no experts"),
        (("tiny-moe", *words, "--skew", "-1"), "--skew must be from 0 to 4, not -1"),
        (("tiny-moe", "--skew", "1"), "--skew is of weights that --generate makes"),
    ):
        refused = realizar("bench", *options)
        assert refused.status != 0
        assert message in refused.error_lines[0]
    refused = realizar("bench", "tiny-most", *words)
    assert refused.status != 0
    assert "'tiny-most' is not a shape; the shapes are llama-8b" in refused.error_lines[0]


def test_table_for_people(realizar: Callable[..., Any], weights_only: Path) -> None:
    result = realizar("bench", weights_only, "--prompt-tokens", "8", "--gen-tokens", "2", "--repeats", "1")
    assert result.status == 0
    assert "decode tok/s" in result.stdout
    assert "peak memory" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", "1,x"), "--batch must be numbers"),
        (("--batch", "0"), "at least 1"),
        (("--acceptance", "0.8,x"), "--acceptance must be shares"),
        (("--acceptance", "0.5,0.8"), "shares that fall"),
        (("--drafter", "nonesuch.gguf"), "nonesuch.gguf does not exist"),
        (("--prompt-tokens", "0"), "at least 1"),
        (("--gen-tokens", "-1"), "at least 1"),
        (("--prompt-tokens", "99999"), "2048"),
        (("--instruction-set", "mmx"), "mmx"),
        (("--threads", "0"), "threads"),
    ],
)
def test_impossible_work_is_refused(
    realizar: Callable[..., Any], weights_only: Path, words: tuple[str, str], message: str
) -> None:
    result = realizar("bench", weights_only, *words, "--json")
    assert (result.status, result.stdout) == (1, "")
    assert message in result.error_lines[-1]


def test_work_may_fill_the_context(weights_only: Path) -> None:
    """Warming up takes no more of it than the work."""
    checkpoint = open_checkpoint(weights_only)
    short = replace(checkpoint, metadata={**checkpoint.metadata, "llama.context_length": 16})
    [result] = measure_throughput(short, EngineConfig(threads=1), Work(10, 5, (2,), 1), log=[].append)
    assert result.decode_tokens_per_s.median > 0


def test_several_processes_are_measured_as_one(realizar: Callable[..., Any], tiny_path: Path) -> None:
    """Drafts that are drawn go with them."""
    words = ("--threads", "2", "--tensor-parallel", "2", "--acceptance", "0.9", "--gen-tokens", "30", "--device", "cpu")
    result = realizar("bench", tiny_path, *words, "--prompt-tokens", "9", "--repeats", "1", "--json")
    assert result.status == 0, result.stderr
    (found,) = json.loads(result.stdout)["results"]
    assert found["tokens_per_step"] > 1.5
    assert found["decode_tokens_per_s"]["median"] > 0


def test_a_vocabulary_alone_is_refused(realizar: Callable[..., Any], vocabulary_only: Path) -> None:
    result = realizar("bench", vocabulary_only)
    assert result.status == 1
    assert len(result.error_lines) == 1
