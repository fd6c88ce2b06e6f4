"""GPUs of ranks that meet through NCCL, by a library in its place: nobody waits for one that never comes."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from realizar.backends.rank_memory import RankMemory, RankPlace
from realizar.errors import DeviceLostError
from waits import HANG_S

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends.cuda.ranks import group  # noqa: E402


class Library:
    """Connects a rank when the others are there, which they never are."""

    def __init__(self) -> None:
        self.asked, self.others = threading.Event(), threading.Event()

    def ncclGetUniqueId(self, _: object) -> int:
        return 0

    def ncclCommInitRank(self, *_: object) -> int:
        self.asked.set()
        self.others.wait(HANG_S)
        return 0


def test_a_rank_that_is_gone_before_it_connects_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    library, memory = Library(), RankMemory(2, 0)
    monkeypatch.setattr(group, "_library", lambda: library)
    monkeypatch.setattr(group, "share_memory", lambda *_: None)  # no way to each other's memory
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    watcher = threading.Thread(target=lambda: library.asked.wait(HANG_S) and memory.break_off())
    watcher.start()
    with pytest.raises(DeviceLostError, match="a rank of the model is gone"):
        group.GPUGroup(RankPlace(0, 2, memory, lambda word: (word, word)), torch.device("cpu")).share(1)
    assert not library.others.is_set()
    library.others.set()
    watcher.join()
    memory.close()
