"""`RankSums`: sums of the ranks of a model, each with a GPU of its own, and `GPUGroup`, which has them. torch."""

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
from realizar.backends.cuda.peers import (
    PeerMemory,
    PeerSums,
    Sums,
    branch_places,
    peer_bytes,
    release_memory,
    share_memory,
)
from realizar.backends.cuda.step_arrays import StepSizes
from realizar.backends.rank_memory import RankPlace
from realizar.backends.resolved_config import ResolvedConfig
from realizar.errors import DeviceLostError, UnsupportedModelError
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)
_LIBRARY = "libnccl.so.2"  # which torch has loaded
_ID_BYTES = 128
_FLOAT32, _SUM = 7, 0  # of `ncclDataType_t` and `ncclRedOp_t`
_LOCK_S = 1.0
_ABORT_S = 10.0
_ON_ONE_HOST = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",  # multicast over NVLink needs a service that hosts may lack
}


class RankGroup(Protocol):
    """All ranks of a model; each makes the same calls, those about tensors on the stream of its steps."""

    def share(self, num_bytes: int) -> PeerMemory | None:
        """Memory of each rank that all others' GPUs write, in loads. None where one can't; the group then adds up."""

    def add_up(self, values: torch.Tensor, total: torch.Tensor) -> None:
        """total = the sum of all ranks' values, float32, the same bits on all. Both are contiguous, and may be one."""

    def gather(self, own: torch.Tensor, all_values: torch.Tensor) -> None:
        """all_values [ranks, ...] = each rank's own, float32; both are contiguous."""

    def least(self, own: int) -> int:
        """The least of all ranks' numbers, in loads."""

    def close(self) -> None:
        """Free what the group has, once no graph has its sums any more."""


class RankSums(Protocol):
    """What a step's matmuls leave as parts of sums, added up over their splits and over ranks.

    `launching`: options of the step's kernels.
    """

    def of_branch(self, place: int, turn: int, own: Sums, launching: dict[str, bool], *, by_blocks: bool) -> Sums:
        """Of a branch, at one of two places: what its norm reads, by programs of a token's blocks or of whole tokens.

        Neighbours have other turns. One rank alone has the bias.
        """

    def of_stream(self, hidden: torch.Tensor, launching: dict[str, bool]) -> None:
        """Add up embeddings, float32 [tokens, hidden_size], of which each is zeros on all ranks but one."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of all ranks' values, float32 [tokens, 1 or 2] and contiguous, which are overwritten."""

    def of_logits(self, own: Sums, launching: dict[str, bool]) -> Sums:
        """Those of all ids, from the sums of this rank's, float32 [splits, tokens, ids]."""


def make_sums(
    group: RankGroup, spec: ModelSpec, config: ResolvedConfig, sizes: StepSizes, device: torch.device
) -> RankSums:  # fmt: skip
    """Those of steps of such sizes, through memory that GPUs write of each other where all can."""
    memory = group.share(peer_bytes(spec, sizes.tokens, sizes.selected))
    if memory is None:
        return GroupSums(group, spec, sizes.tokens, sizes.selected, device)
    return PeerSums(memory, spec, sizes.tokens, sizes.selected, exactly=config.batch_invariant)


def sums_bytes(spec: ModelSpec, tokens: int, selected: int) -> int:
    """Bytes of the `RankSums` of a model, or of a rank's part of it, at most."""
    if spec.share.ranks == 1:
        return 0
    of_group = sum(each.nbytes for each in _buffers(spec, tokens, selected, torch.device("meta")))
    return max(of_group, peer_bytes(spec, tokens, selected))


class GroupSums:
    """`RankSums` through calls of a group."""

    def __init__(self, group: RankGroup, spec: ModelSpec, tokens: int, selected: int, device: torch.device) -> None:
        self._group, self._spec = group, spec
        self._totals, self._own, self._parts, self._logits = _buffers(spec, tokens, selected, device)

    def of_branch(self, place: int, turn: int, own: Sums, launching: dict[str, bool], *, by_blocks: bool) -> Sums:
        partials = own.partials
        total = self._totals[place, : partials.shape[1]]
        only = partials[0]
        if len(partials) > 1 or own.bias is not None or only.dtype != total.dtype or not only.is_contiguous():
            _finish(own, total)
            only = total
        self._group.add_up(only, total)
        return Sums(total[None], 1)

    def of_stream(self, hidden: torch.Tensor, launching: dict[str, bool]) -> None:
        self._group.add_up(hidden, hidden)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        self._group.add_up(values, values)
        return values.div_(self._spec.share.ranks)

    def of_logits(self, own: Sums, launching: dict[str, bool]) -> Sums:
        _, tokens, ids = own.partials.shape
        part = self._own[:tokens]
        _finish(own, part[:, :ids])
        parts = self._parts[: len(self._parts) // self._own.shape[0] * tokens].view(-1, *part.shape)
        self._group.gather(part, parts)
        logits = self._logits[:tokens]
        logits.view(tokens, len(parts), -1).copy_(parts.transpose(0, 1))
        return Sums(logits[None, :, : self._spec.vocab_size], 1)


def _buffers(spec: ModelSpec, tokens: int, selected: int, device: torch.device) -> list[torch.Tensor]:
    """Sums of the stream at one or two places, and logits: of this rank, of all by rank, and of all by id."""
    ranks = spec.share.ranks
    ids = -(-spec.vocab_size // ranks)
    stream = branch_places(spec), tokens, spec.hidden_size
    shapes = stream, (selected, ids), (ranks * selected * ids,), (selected, ranks * ids)
    return [torch.zeros(shape, device=device) for shape in shapes]


def _finish(own: Sums, total: torch.Tensor) -> None:
    partials = own.partials
    if partials.dtype == torch.float16:
        total.copy_(partials.float().sum(0).mul_(HALF_FACTOR.value))
    else:
        torch.sum(partials, 0, out=total) if total.is_contiguous() else total.copy_(partials.sum(0))
    if own.bias is not None:
        total.add_(own.bias)


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _ID_BYTES),)


class GPUGroup:
    """A `RankGroup` of GPUs of one host, each of another process.

    Where one can't write another's memory their sums go through the NCCL that torch has loaded. Its calls are kernels
    on the current stream, which a graph may hold. Where another rank is gone they would wait for ever: what breaks the
    ranks off aborts them, and what they leave then means nothing.
    """

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self._place, self._device = place, device
        self._memory: PeerMemory | None = None
        self._lock = threading.Lock()  # held while a call starts
        self._aborting: threading.Thread | None = None
        self._communicator: ctypes.c_void_p | None = None

    def share(self, num_bytes: int) -> PeerMemory | None:
        """Raises UnsupportedModelError where there is neither a way to memory nor NCCL."""
        place = self._place
        with torch.cuda.device(self._device):
            self._memory = share_memory(num_bytes, place.rank, self._device, place.memory.at, place.exchange)
        if self._memory is None:
            _LOG.info("GPUs that can't write each other's memory add up through NCCL")
            self._connect()
        return self._memory

    def _connect(self) -> None:
        self._library, communicator, own = _library(), ctypes.c_void_p(), _Id()
        if self._place.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(own)), "making an id")
        first, *_ = self._place.exchange(bytes(own))
        with torch.cuda.device(self._device):
            status = self._library.ncclCommInitRank(
                ctypes.byref(communicator), self._place.ranks, _Id.from_buffer_copy(first), self._place.rank
            )
        self._check(status, "connecting the ranks")
        self._communicator = communicator
        self._place.memory.on_break(self._abort)

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
        if self._memory is not None:
            with torch.cuda.device(self._device):
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
        self._check(status, name)

    def _abort(self) -> None:
        """End what runs, in a thread of its own: NCCL frees its memory only once no graph has calls of it any more."""
        if self._aborting is None:
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
