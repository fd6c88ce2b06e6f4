"""`realizar profile`: the table, the JSON, the picture, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--device", "cpu", "--threads", "1", "--context", "8", "--repeats", "1")


def test_json_and_picture(realizar: Callable[..., Any], weights_only: Path, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    result = realizar("profile", weights_only, *SMALL, "--svg", picture, "--json")
    assert result.status == 0, result.stderr
    profile = json.loads(result.stdout)
    keys = {"device", "batch", "tokens", "context", "parts", "sum_ms", "wall_ms", "rest_ms"}
    assert set(profile) == keys | {"limit_gb_per_s", "limit_bytes", "drafts"}
    assert profile["drafts"] is None
    assert (profile["device"], profile["batch"], profile["tokens"], profile["context"]) == ("cpu", 1, 1, 8)
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_table_for_people(realizar: Callable[..., Any], weights_only: Path) -> None:
    result = realizar("profile", weights_only, *SMALL, "--batch", "2", "--tokens", "3")
    assert result.status == 0, result.stderr
    assert "of limit" in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[-2].startswith("the parts, each timed alone, take ")


def test_drafts_are_counted_where_they_are_asked_for(realizar: Callable[..., Any], weights_only: Path) -> None:
    result = realizar("profile", weights_only, *SMALL, "--speculative-tokens", "2", "--json")
    assert result.status == 0, result.stderr
    drafts = json.loads(result.stdout)["drafts"]
    assert 0 < drafts["accepted_tokens"] <= drafts["draft_tokens"]
    assert len(drafts["acceptance"]) <= 2
    assert drafts["tokens_per_step"] == pytest.approx(1 + sum(drafts["acceptance"]))
    assert drafts["ms"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", "0"), "--batch must be at least 1"),
        (("--tokens", "0"), "--tokens must be at least 1"),
        (("--context", "-1"), "--context must be at least 0"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--context", "99999"), "2048"),
        (("--batch", "65"), "64 rows"),
        (("--tensor-parallel", "2"), "a step is taken apart in one process, and tensor_parallel is 2"),
        (("--svg", "nonesuch/a.svg"), "nonesuch/a.svg can't be written: the folder nonesuch does not exist"),
    ],
)
def test_impossible_work_is_refused(
    realizar: Callable[..., Any], weights_only: Path, words: tuple[str, str], message: str
) -> None:
    result = realizar("profile", weights_only, "--device", "cpu", "--threads", "1", *words)
    assert (result.status, result.stdout) == (1, "")
    assert message in result.error_lines[-1]
