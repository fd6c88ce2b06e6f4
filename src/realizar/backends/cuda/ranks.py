"""`RankSums`: sums of the ranks of a model, each with a GPU of its own; `NCCLGroup` adds them up. torch."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from dataclasses import replace
from functools import cache
from typing import Protocol

import torch

from realizar.backends.cuda.device import SLOWER, DeviceProfile
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.rank_memory import RankPlace
from realizar.errors import DeviceLostError, UnsupportedModelError
from realizar.models.spec import ModelSpec

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


class RankGroup(Protocol):
    """All ranks of a model; each makes the same calls, those about tensors on the stream of its steps."""

    def add_up(self, values: torch.Tensor, total: torch.Tensor) -> None:
        """total = the sum of all ranks' values, float32, the same bits on all. Both are contiguous, and may be one."""

    def gather(self, own: torch.Tensor, all_values: torch.Tensor) -> None:
        """all_values [ranks, ...] = each rank's own, float32; both are contiguous."""

    def least(self, own: int) -> int:
        """The least of all ranks' numbers, in loads."""

    def close(self) -> None:
        """Free what the group has, once no graph has its sums any more."""


class RankSums:
    """What a step's matmuls leave as parts of sums, added up over their splits and then over ranks.

    `tokens` and `selected` are those of the largest step.
    """

    def __init__(self, group: RankGroup, spec: ModelSpec, tokens: int, selected: int, device: torch.device) -> None:
        self._group, self._spec = group, spec
        self._totals, self._own, self._parts, self._logits = _buffers(spec, tokens, selected, device)

    def totals(self, place: int, tokens: int) -> torch.Tensor:
        """float32 [1, tokens, hidden_size]: what `add_up` made, at one of two places."""
        return self._totals[place, None, :tokens]

    def add_up(self, place: int, partials: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Of float32 [splits, tokens, hidden_size], or float16 of `HALF_FACTOR`; one rank alone has the bias."""
        total = self._totals[place, : partials.shape[1]]
        only = partials[0]
        if len(partials) > 1 or bias is not None or only.dtype != total.dtype or not only.is_contiguous():
            _finish(partials, bias, total)
            only = total
        self._group.add_up(only, total)

    def add_up_stream(self, hidden: torch.Tensor) -> None:
        """Of embeddings, float32 [tokens, hidden_size], of which each is zeros on all ranks but one."""
        self._group.add_up(hidden, hidden)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of all ranks' values, float32 and contiguous, which are overwritten."""
        self._group.add_up(values, values)
        return values.div_(self._spec.share.ranks)

    def side_by_side(self, partials: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """From the sums of this rank's ids, float32 [splits, tokens, ids], those of all: [1, tokens, vocab_size]."""
        _, tokens, ids = partials.shape
        own = self._own[:tokens]
        _finish(partials, bias, own[:, :ids])
        parts = self._parts[: len(self._parts) // self._own.shape[0] * tokens].view(-1, *own.shape)
        self._group.gather(own, parts)
        logits = self._logits[:tokens]
        logits.view(tokens, len(parts), -1).copy_(parts.transpose(0, 1))
        return logits[None, :, : self._spec.vocab_size]


def sums_bytes(spec: ModelSpec, tokens: int, selected: int) -> int:
    """Bytes of the `RankSums` of a model, or of a rank's part of it."""
    if spec.share.ranks == 1:
        return 0
    return sum(each.nbytes for each in _buffers(spec, tokens, selected, torch.device("meta")))


def _buffers(spec: ModelSpec, tokens: int, selected: int, device: torch.device) -> list[torch.Tensor]:
    """Sums of the stream at one or two places, and logits: of this rank, of all by rank, and of all by id."""
    ranks = spec.share.ranks
    ids = -(-spec.vocab_size // ranks)
    places = 2 if any(one.norms is not None for _, one in spec.mixtures()) else 1
    shapes = (places, tokens, spec.hidden_size), (selected, ids), (ranks * selected * ids,), (selected, ranks * ids)
    return [torch.zeros(shape, device=device) for shape in shapes]


def _finish(partials: torch.Tensor, bias: torch.Tensor | None, total: torch.Tensor) -> None:
    if partials.dtype == torch.float16:
        total.copy_(partials.float().sum(0).mul_(HALF_FACTOR.value))
    else:
        torch.sum(partials, 0, out=total) if total.is_contiguous() else total.copy_(partials.sum(0))
    if bias is not None:
        total.add_(bias)


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _ID_BYTES),)


class NCCLGroup:
    """A `RankGroup` of GPUs of one host, each of another process, through the NCCL that torch has loaded.

    Its calls are kernels on the current stream, which a graph may hold. Where another rank is gone they would wait for
    ever: what breaks the ranks off aborts them, and what they leave then means nothing. The process's NCCL goes over
    loopback (NCCL_SOCKET_IFNAME), unless its environment says otherwise.

    Raises:
        UnsupportedModelError: there is no NCCL, or it can't connect the ranks.
        DeviceLostError, and what another rank's load raises: as `RankPlace.exchange`.
    """

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self._place, self._device = place, device
        self._lock = threading.Lock()  # held while a call starts
        self._lock_of_abort = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._library = _library()
        self._communicator: ctypes.c_void_p | None = None
        own = _Id()
        if place.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(own)), "making an id")
        first, *_ = place.exchange(bytes(own))
        self._connect(_Id.from_buffer_copy(first))
        place.memory.on_break(self._abort)

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

    def close(self) -> None:
        self._abort()
        assert self._aborting is not None
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
