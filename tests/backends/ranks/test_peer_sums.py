"""Sums over peer memory, by processes that write each other's: on GPUs where there are enough, else interpreted."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realizar.errors import DeviceLostError
from waits import HANG_S

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends.cuda.ranks import peers  # noqa: E402
from realizar.backends.cuda.ranks.peers import release_memory, share_memory  # noqa: E402


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


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_wide_row_is_exchanged_as_others(ranks: int) -> None:
    """Each sender has a place, as for squares of the tokens of a large step."""
    width = 1 << 20
    assert peers.Region.most_at_once(ranks, 1, width) == 1
    assert peers.Region.size_bytes(ranks, 1, width) >= (ranks - 1) * width * 4


class Status(IntEnum):
    DONE, FAILED = 0, 1


class Driver:
    """A driver's functions, of which one may fail; `taken` is what is not given back."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    _TAKES = ("cuMemAlloc", "cuMemHostRegister", "cuIpcOpenMemHandle")
    _GIVES = ("cuMemFree", "cuMemHostUnregister", "cuIpcCloseMemHandle")

    def __init__(self, failing: str) -> None:
        self.taken = Counter[str]()
        self._failing, self._word = failing, ctypes.create_string_buffer(64)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == self._failing:
                return (Status.FAILED, None)
            if name in self._TAKES:
                self.taken[name] += 1
            if name in self._GIVES:
                self.taken[self._TAKES[self._GIVES.index(name)]] -= 1
            return Status.DONE, self.CUipcMemHandle() if name == "cuIpcGetMemHandle" else 4096 + len(arguments)

        return call

    def CUipcMemHandle(self) -> Any:
        return SimpleNamespace(getPtr=lambda: ctypes.addressof(self._word))


@pytest.mark.parametrize(
    ("failing", "is_shared"),
    [("", True), ("cuMemFree", True), ("cuIpcOpenMemHandle", False), ("cuMemHostGetDevicePointer", False)],
)
def test_shared_memory_is_given_back(failing: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ranks can't share it, where one is gone meanwhile, and later; a driver that refuses ends nothing."""
    driver = Driver(failing)
    monkeypatch.setattr(peers, "driver_module", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    cpu, said = torch.device("cpu"), list[bytes]()

    def exchange(own: bytes) -> list[bytes]:
        said.append(own)
        return [own, own or b"word"]

    def lost(own: bytes) -> list[bytes]:
        raise DeviceLostError("rank 1 of 2 has ended")

    memory = share_memory(1024, 0, cpu, 8192, exchange)
    assert (memory is not None) is is_shared
    assert len(said) == 2
    if memory is not None:
        assert driver.taken.total() == 3
        release_memory(memory)
    with pytest.raises(DeviceLostError):
        share_memory(1024, 0, cpu, 8192, lost)
    assert {name for name, count in driver.taken.items() if count} == (
        {"cuMemAlloc"} if failing == "cuMemFree" else set()
    )
