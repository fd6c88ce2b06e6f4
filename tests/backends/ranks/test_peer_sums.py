"""Sums over peer memory, by processes that write each other's: on GPUs where there are enough, else interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from waits import HANG_S

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")


@pytest.mark.parametrize("count", [2, 3])
def test_sums_of_ranks(count: int, tmp_path: Path) -> None:
    check_sums(count, tmp_path)


@pytest.mark.gpu
def test_sums_of_gpus(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    check_sums(count, tmp_path)


def check_sums(count: int, folder: Path) -> None:
    """Each rank finds its sums right, and all have the same bits."""
    command = [sys.executable, str(Path(__file__).with_name("peer_sums.py"))]
    interpreted = {} if torch.cuda.device_count() >= count else {"TRITON_INTERPRET": "1"}
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, **interpreted}
    ranks = [subprocess.Popen([*command, str(rank), str(count), str(folder)], env=environment) for rank in range(count)]
    try:
        assert [rank.wait(HANG_S) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()
    assert len({(folder / f"digest-{rank}").read_text() for rank in range(count)}) == 1
