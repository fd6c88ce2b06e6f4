"""`realizar serve --tensor-parallel 2`: whichever process of the model dies, clients hear of it, and others follow."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.process.served import Served, Stream, is_ready, serving, short_text
from waits import child_pids, is_alive, wait_until

_RANKS = ("--tensor-parallel", "2", "--context-length", "512")
_DEVICES = {"cpu": ("--device", "cpu", "--threads", "2"), "cuda": ("--device", "cuda", "--max-running", "8")}


def _has_ended(process: int) -> bool:
    return not is_alive(process)


def _rank_pid(served: Served) -> int:
    (rank,) = child_pids(served.engine_pid)
    return rank


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_of_two_processes_outlives_the_death_of_each(device: str, tiny: Path, tmp_path: Path) -> None:
    if device == "cuda":
        torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
    with serving(tiny, *_RANKS, *_DEVICES[device], hold=tmp_path) as served:
        url = served.wait_ready()
        text = short_text(url)
        for dies in (_rank_pid, lambda each: each.engine_pid):
            engine, rank = served.engine_pid, _rank_pid(served)
            stream = Stream(url, max_tokens=400)
            with served.held_steps():
                stream.wait_begun()
                os.kill(dies(served), signal.SIGKILL)
            stream.join()
            assert stream.finish is None
            assert stream.error is not None
            assert "the engine stopped while this request was open" in stream.error
            for process in (engine, rank):
                wait_until(functools.partial(_has_ended, process))
            wait_until(lambda: is_ready(url))
            assert short_text(url) == text
        served.wait_line(r"rank 1 of 2 \(process \d+\) was killed by SIGKILL")
        engine = served.engine_pid
        os.kill(_rank_pid(served), signal.SIGKILL)
        wait_until(functools.partial(_has_ended, engine))  # without a request that would fail
        wait_until(lambda: is_ready(url))
        assert short_text(url) == text


def test_a_model_that_ranks_do_not_divide_is_refused(refusal: Callable[..., str], tiny: Path) -> None:
    words = ("--tensor-parallel", "7", "--threads", "7", "--device", "cpu")
    assert "7 ranks can't share evenly" in refusal(tiny, *words)
