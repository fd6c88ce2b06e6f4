"""`GPUGroup`: the ranks of a model, each with a GPU of its own, as a `RankGroup`. torch."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cache

import torch

from realizar.backends.cuda.device import SLOWER, DeviceProfile
from realizar.backends.cuda.ranks.peers import PeerMemory, release_memory, share_memory
from realizar.backends.rank_memory import RankPlace
from realizar.errors import DeviceLostError, UnsupportedModelError

_LOG = logging.getLogger(__name__)
_LIBRARY = "libnccl.so.2"  # which torch has loaded
_ID_BYTES = 128
_FLOAT32, _SUM = 7, 0  # of `ncclDataType_t` and `ncclRedOp_t`
_NOT_ASKED = 1  # ncclUnhandledCudaError: the thread failed before
_LOOK_S = 0.1
_LOCK_S = 1.0
_ABORT_S = 10.0
_ON_ONE_HOST = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",  # multicast over NVLink needs a service that hosts may lack
}


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _ID_BYTES),)


class GPUGroup:
    """A `RankGroup` of GPUs of one host, each of another process.

    Where one can't write another's memory their sums go through the NCCL that torch has loaded. Its calls are kernels
    on the current stream, which a graph may hold. Where another rank is gone they would wait for ever: what breaks the
    ranks off aborts them, and what they leave then means nothing. The process's NCCL goes over loopback
    (NCCL_SOCKET_IFNAME), unless its environment says otherwise.
    """

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self._place, self._device = place, device
        self._memory: PeerMemory | None = None
        self._lock = threading.Lock()  # held while a call starts
        self._lock_of_abort = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._communicator: ctypes.c_void_p | None = None

    def share(self, num_bytes: int) -> PeerMemory | None:
        """Memory of ranks, or None.

        Raises:
            UnsupportedModelError: there is neither a way to memory nor NCCL, or NCCL can't connect the ranks.
            DeviceLostError, and what another rank's load raises: as `RankPlace.exchange`.
        """
        place = self._place
        with torch.cuda.device(self._device):
            self._memory = share_memory(num_bytes, place.rank, self._device, place.memory.at, place.exchange)
        if self._memory is None:
            _LOG.info("GPUs that can't write each other's memory add up through NCCL")
            self._join()
        return self._memory

    def _join(self) -> None:
        self._library, own = _library(), _Id()
        if self._place.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(own)), "making an id")
        first, *_ = self._place.exchange(bytes(own))
        self._connect(_Id.from_buffer_copy(first))
        self._place.memory.on_break(self._abort)

    def _connect(self, group: _Id) -> None:
        """In a thread, which would wait for ever for a rank that is gone."""
        place, found, communicator = self._place, list[int](), ctypes.c_void_p()

        def connect() -> None:
            torch.cuda.set_device(self._device)
            found.append(self._library.ncclCommInitRank(ctypes.byref(communicator), place.ranks, group, place.rank))

        connecting = threading.Thread(target=connect, name="nccl-connect", daemon=True)
        connecting.start()
        while connecting.is_alive():
            connecting.join(_LOOK_S)
            if place.memory.is_broken:
                raise DeviceLostError("a rank of the model is gone")
        self._check(found[0] if found else _NOT_ASKED, "connecting the ranks")
        self._communicator = communicator

    def like_others(self, opened: DeviceProfile) -> DeviceProfile:
        """This rank's GPU, without the kernels that another one's goes without. UnsupportedModelError: they differ."""
        kinds = self._place.exchange(f"{opened.name}, {opened.capability}".encode())
        if len(set(kinds)) > 1:
            names = "; ".join(kind.decode() for kind in kinds)
            raise UnsupportedModelError(f"tensor_parallel needs GPUs of one kind, and these are {names}")
        words = self._place.exchange(" ".join(opened.without).encode())
        without = {name for word in words for name in word.decode().split()}
        return replace(opened, without=frozenset(family for family in SLOWER if family in without))

    def add_up(self, values: torch.Tensor, total: torch.Tensor) -> None:
        self._start("ncclAllReduce", values, total, _FLOAT32, _SUM)

    def gather(self, own: torch.Tensor, all_values: torch.Tensor) -> None:
        self._start("ncclAllGather", own, all_values, _FLOAT32)

    def least(self, own: int) -> int:
        return min(int(word) for word in self._place.exchange(str(own).encode()))

    def end_load(self) -> None:
        if self._memory is not None:
            self._memory.end_load()

    def close(self) -> None:
        if self._memory is not None:
            with suppress(RuntimeError), torch.cuda.device(self._device):  # of a device that is lost
                release_memory(self._memory)
            self._memory = None
        if self._communicator is not None:
            self._abort()
        if self._aborting is not None:
            self._aborting.join(_ABORT_S)

    def _start(self, name: str, source: torch.Tensor, target: torch.Tensor, *kind: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with self._lock:
            if self._communicator is None:
                raise DeviceLostError("a rank of the model is gone")
            status = getattr(self._library, name)(
                ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr()),
                ctypes.c_size_t(source.numel()), *kind, self._communicator, stream,
            )  # fmt: skip
        if status:
            raise DeviceLostError(f"{name} failed in NCCL: {self._text(status)}")

    def _abort(self) -> None:
        """End what runs, in a thread of its own: NCCL frees its memory only once no graph has calls of it any more."""
        with self._lock_of_abort:
            if self._aborting is not None:
                return
            self._aborting = threading.Thread(target=self._abort_calls, name="nccl-abort", daemon=True)
            self._aborting.start()

    def _abort_calls(self) -> None:
        is_held = self._lock.acquire(timeout=_LOCK_S)  # a call may wait where the device's queue is full
        communicator, self._communicator = self._communicator, None
        if is_held:
            self._lock.release()
        torch.cuda.set_device(self._device)
        status = self._library.ncclCommAbort(communicator)
        if status:
            _LOG.warning("NCCL could not be closed: %s", self._text(status))

    def _check(self, status: int, what: str) -> None:
        if status:
            raise UnsupportedModelError(f"{what} of {self._place.ranks} GPUs failed in NCCL: {self._text(status)}")

    def _text(self, status: int) -> str:
        text: bytes = self._library.ncclGetErrorString(status)
        return text.decode(errors="replace")


@cache
def _library() -> ctypes.CDLL:
    for name, value in _ON_ONE_HOST.items():
        os.environ.setdefault(name, value)
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise UnsupportedModelError(f"tensor_parallel on GPUs needs NCCL: {error}") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _Id, ctypes.c_int]
    return library
