"""`PeerSums`: sums over ranks whose GPUs write each other's memory, in the kernels that read them. torch."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from realizar.backends.cuda.kernel_sizes import norm_blocks, whole_width
from realizar.backends.cuda.kernels.exchange import add_up_sums, send_sums, share_sums
from realizar.backends.cuda.native.launcher import checked, driver_module
from realizar.errors import KernelError
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)

Exchange: TypeAlias = tuple[torch.Tensor, torch.Tensor, int]
"""Addresses, int64; state, int32 [2]; words from a sender's place to the next."""

_PATIENCE, _OF_STEPS = (1 << 26) - 1, (1 << 23) - 1  # turns of a wait: about a minute in loads, and 8 s after them
_WORD, _HANDLE_BYTES, _ALIGNED = 4, 64, 256
_AT_ONCE_BYTES = {2: 1 << 62, 3: 512 << 10, 4: 512 << 10}  # of a step's rows, by ranks
_LEAST_AT_ONCE_BYTES = 256 << 10  # of more ranks
_FEW_TOKENS = 64  # whose rows have several programs each, also where their norm has one
_MANY_TOKENS = 256  # more are exchanged in halves
_MEETING = 128  # words
_SENT_IDS = 1024  # of a program


@dataclass(frozen=True, slots=True)
class Sums:
    """What a kernel reads as a matmul's sums.

    Attributes:
        partials: float32 [splits, tokens, width], or float16 of `HALF_FACTOR`. bias: added to them.
        shared: a kernel's arguments of `kernels.exchange.load_rank_sum`, by which it adds up those of all ranks.
    """

    partials: torch.Tensor
    splits: int
    bias: torch.Tensor | None = None
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of all ranks, each on its GPU, where others write.

    Attributes:
        addresses: of each rank's memory, as this process reaches it. own_at: of this rank's.
        state: int32 [2] on this rank's device: see `kernels.exchange`.
        page_at: of the page of the host that begins with a word which is not 0 where ranks are broken off.
        broken_at: of that word, for a kernel.
    """

    rank: int
    addresses: list[int]
    own_at: int
    state: torch.Tensor
    page_at: int
    broken_at: int

    @property
    def ranks(self) -> int:
        return len(self.addresses)

    def end_load(self) -> None:
        """From now on no rank waits while another one compiles."""
        self.state[1] = _OF_STEPS


def share_memory(
    num_bytes: int, rank: int, device: torch.device, page_at: int, exchange: Callable[[bytes], Sequence[bytes]]
) -> PeerMemory | None:
    """Take so much memory of a device, all free, and reach that of the other ranks; None where one of them can't.

    `page_at`: see `PeerMemory`. `exchange` gives all ranks' words, by rank.
    """
    offered = _offer_memory(num_bytes, rank, device, page_at)
    is_shared = False
    try:
        handles = exchange(b"" if offered is None else offered[1])
        reached = offered is not None and all(handles) and _reach_others(offered[0], handles)
        is_shared = all(exchange(b"reached" if reached else b""))
    finally:
        if offered is not None and not is_shared:
            release_memory(offered[0])
    return offered[0] if offered is not None and is_shared else None


def _offer_memory(num_bytes: int, rank: int, device: torch.device, page_at: int) -> tuple[PeerMemory, bytes] | None:
    """This rank's memory, and the word by which others reach it; None where that is refused."""
    driver, what, own_at = driver_module(), "offering memory to other ranks", 0
    state = torch.tensor([rank, _PATIENCE], dtype=torch.int32, device=device)
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    try:
        own_at = int(checked(driver.cuMemAlloc(num_bytes), what))
        checked(driver.cuMemsetD32(own_at, 0xFFFFFFFF, num_bytes // _WORD), what)
        torch.cuda.synchronize(device)
        handle = checked(driver.cuIpcGetMemHandle(own_at), what)
        checked(driver.cuMemHostRegister(page_at, mmap.PAGESIZE, flags), what)
        broken_at = int(checked(driver.cuMemHostGetDevicePointer(page_at, 0), what))
    except KernelError as error:
        _LOG.info("%s", error)
        _give_back(own_at, page_at)
        return None
    word = ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES)
    return PeerMemory(rank, [], own_at, state, page_at, broken_at), word


def _reach_others(memory: PeerMemory, handles: Sequence[bytes]) -> bool:
    """Add the addresses of all ranks' memory; False where one is refused."""
    driver = driver_module()
    lazily = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    for other, word in enumerate(handles):
        address = memory.own_at
        if other != memory.rank:
            handle = driver.CUipcMemHandle()
            ctypes.memmove(int(handle.getPtr()), word, _HANDLE_BYTES)
            try:
                address = int(checked(driver.cuIpcOpenMemHandle(handle, lazily), f"reaching rank {other}'s memory"))
            except KernelError as error:
                _LOG.info("%s", error)
                return False
        memory.addresses.append(address)
    return True


def release_memory(memory: PeerMemory) -> None:
    """Give back what `share_memory` took, once no kernel of this rank uses it; of a device that is lost nothing is."""
    driver = driver_module()
    for address in memory.addresses:
        if address != memory.own_at:
            driver.cuIpcCloseMemHandle(address)
    _give_back(memory.own_at, memory.page_at)


def _give_back(own_at: int, page_at: int) -> None:
    """Memory, 0 if there is none, and a page of the host; where that was not taken the driver says so."""
    driver = driver_module()
    if own_at:
        driver.cuMemFree(own_at)
    driver.cuMemHostUnregister(page_at)


class Region:
    """Places for the sums of up to `tokens` rows of `width`, at `offset` bytes of each rank's memory."""

    def __init__(self, memory: PeerMemory, offset: int, tokens: int, width: int) -> None:
        self._memory, ranks, rank = memory, memory.ranks, memory.rank
        most = self.most_at_once(ranks, tokens, width)
        at_once, parts = most * width, -(-tokens // ranks) * width
        own, bases = memory.own_at + offset, [address + offset for address in memory.addresses]
        broken = memory.broken_at
        others = [(rank + turn) % ranks for turn in range(1, ranks)]  # each begins with another one

        def slot(other: int, stride: int) -> int:
            return bases[other] + (rank - (rank > other)) * stride * _WORD

        totals = [base + (ranks - 1) * parts * _WORD for base in bases]
        self._at_once = self._exchange([*(slot(other, at_once) for other in others), own, broken], at_once)
        self._parts = self._exchange([*(slot(other, parts) for other in range(ranks)), own, broken], parts)
        self._totals = self._exchange([totals[rank], broken], 0)
        self.to_totals = self._table(totals)

    @staticmethod
    def most_at_once(ranks: int, tokens: int, width: int) -> int:
        """Rows of which each rank sends its parts to all others, at most; each of more is added up by one rank."""
        return min(tokens, max(1, _AT_ONCE_BYTES.get(ranks, _LEAST_AT_ONCE_BYTES) // (width * _WORD)))

    @classmethod
    def size_bytes(cls, ranks: int, tokens: int, width: int) -> int:
        at_once = (ranks - 1) * cls.most_at_once(ranks, tokens, width)
        return max(at_once, (ranks - 1) * -(-tokens // ranks) + tokens) * width * _WORD

    def at_once(self, halves: bool = False) -> Exchange:
        """For `load_rank_sum` with all ranks."""
        return (*self._at_once[:2], self._at_once[2] << halves)

    def parts(self, halves: bool = False) -> Exchange:
        """For `share_sums`."""
        return (*self._parts[:2], self._parts[2] << halves)

    @property
    def totals(self) -> Exchange:
        """For `load_rank_sum` with the one total."""
        return self._totals

    def _exchange(self, addresses: list[int], stride: int) -> Exchange:
        return self._table(addresses), self._memory.state, stride

    def _table(self, addresses: list[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self._memory.state.device)


class PeerSums:
    """`RankSums` through memory of all ranks.

    What follows each other has other places there: the stream's embeddings, sums of branches by turns, and logits,
    which come after a meeting of all ranks where several tails follow each other.
    """

    def __init__(
        self, memory: PeerMemory, spec: ModelSpec, tokens: int, selected: int, *, exactly: bool
    ) -> None:  # fmt: skip
        """`tokens`, `selected`: of the largest step. `exactly`: a token's bits do not depend on a step's tokens."""
        self._ranks, self._width, self._exactly = memory.ranks, spec.hidden_size, exactly
        self._cut = norm_blocks(self._width)
        self._vocab_size = spec.vocab_size
        self._most = Region.most_at_once(self._ranks, tokens, self._width)
        device = memory.state.device
        places = branch_places(spec)
        self._totals = torch.zeros((places, 1, min(tokens, _FEW_TOKENS), self._width), device=device)
        self._meeting = torch.zeros((1, 1, _MEETING), device=device)
        *ends, logits_at = accumulate(_sizes(spec, tokens, selected)[:-1], initial=0)
        self._stream, *turns = (Region(memory, at, tokens, self._width) for at in ends[:-2])
        self._turns = [turns[place::places] for place in range(places)]
        self._of_heads = Region(memory, ends[-2], 1, 2 * tokens)
        self._met = Region(memory, ends[-1], 1, _MEETING)
        logits = [address + logits_at for address in memory.addresses]
        own = [address + memory.rank * -(-spec.vocab_size // self._ranks) * _WORD for address in logits]
        self._send_to = torch.tensor(own, dtype=torch.int64, device=device)
        here = torch.tensor([logits[memory.rank], memory.broken_at], dtype=torch.int64, device=device)
        self._logits: Exchange = here, memory.state, 0

    def of_branch(self, place: int, turn: int, own: Sums, launching: dict[str, bool], *, by_blocks: bool) -> Sums:
        """Of a branch, at one of two places: what its norm reads, by programs of a token's blocks or of whole tokens.

        Neighbours have other turns.
        """
        tokens = own.partials.shape[1]
        region, halves = self._turns[place][turn % 2], not self._exactly and tokens > _MANY_TOKENS
        sums = self._exchanged(region, own, halves, launching)
        if by_blocks or tokens > _FEW_TOKENS:
            return sums
        totals = self._totals[place, :, :tokens]
        self._add_up(sums, totals, launching)
        return Sums(totals, 1)

    def of_stream(self, hidden: torch.Tensor, launching: dict[str, bool]) -> None:
        """Add up embeddings, float32 [tokens, hidden_size], of which each is zeros on all ranks but one."""
        self._add_up(self._exchanged(self._stream, Sums(hidden[None], 1), False, launching), hidden[None], launching)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of all ranks' values, float32 [tokens, 1 or 2] and contiguous, which are overwritten."""
        row = values.view(1, 1, -1)
        self._add_up(self._at_once(self._of_heads, Sums(row, 1)), row, {"DEPENDENT": False})
        return values.div_(self._ranks)

    def of_logits(self, own: Sums, launching: dict[str, bool]) -> Sums:
        """Those of all ids, from the sums of this rank's, float32 [splits, tokens, ids]."""
        self._add_up(self._at_once(self._met, Sums(self._meeting, 1)), self._meeting, launching)
        _, tokens, ids = own.partials.shape
        cut = whole_width(_SENT_IDS)
        bias = own.partials if own.bias is None else own.bias
        send_sums[(tokens, -(-ids // cut.block))](
            own.partials, *own.partials.stride()[:2], bias, ids, self._send_to, self._vocab_size, SPLITS=own.splits,
            BIAS=own.bias is not None, RANKS=self._ranks, BLOCK=cut.block, num_warps=cut.warps, **launching,
        )  # fmt: skip
        return Sums(own.partials, 1, None, {"exchange": self._logits, "RANKS": 1})

    def _exchanged(self, region: Region, own: Sums, halves: bool, launching: dict[str, bool]) -> Sums:
        """`own`, added up over ranks by who reads it, or where there are many by a rank for each token."""
        tokens = own.partials.shape[1]
        if tokens <= self._most:
            return self._at_once(region, own, halves)
        cut, bias = self._cut, own.partials if own.bias is None else own.bias
        share_sums[(tokens, cut.blocks)](
            own.partials, *own.partials.stride()[:2], bias, self._width, region.parts(halves), region.to_totals,
            SPLITS=own.splits, BIAS=own.bias is not None, RANKS=self._ranks, HALVES=halves, BLOCK=cut.block,
            num_warps=cut.warps, **launching,
        )  # fmt: skip
        return Sums(own.partials, 1, None, {"exchange": region.totals, "RANKS": 1, "HALVES": halves})

    def _at_once(self, region: Region, own: Sums, halves: bool = False) -> Sums:
        shared = {"exchange": region.at_once(halves), "RANKS": self._ranks, "HALVES": halves}
        return Sums(own.partials, own.splits, own.bias, shared)

    def _add_up(self, sums: Sums, totals: torch.Tensor, launching: dict[str, bool]) -> None:
        width = totals.shape[2]
        cut, bias = norm_blocks(width), sums.partials if sums.bias is None else sums.bias
        add_up_sums[(totals.shape[1], cut.blocks)](
            sums.partials, *sums.partials.stride()[:2], bias, totals, width, SPLITS=sums.splits,
            BIAS=sums.bias is not None, BLOCK=cut.block, num_warps=cut.warps, **sums.shared, **launching,
        )  # fmt: skip


def peer_bytes(spec: ModelSpec, tokens: int, selected: int) -> int:
    """Bytes of a rank's memory that others write."""
    return sum(_sizes(spec, tokens, selected))


def _sizes(spec: ModelSpec, tokens: int, selected: int) -> list[int]:
    """Bytes of the stream's places, of branches' by turns and in a turn by place, of squares over heads, of a meeting,
    and of logits.
    """
    ranks = spec.share.ranks
    of_rows = Region.size_bytes(ranks, tokens, spec.hidden_size)
    logits = selected * spec.vocab_size * _WORD
    of_heads, met = (Region.size_bytes(ranks, 1, words) for words in (2 * tokens, _MEETING))
    sizes = [*[of_rows] * (1 + 2 * branch_places(spec)), of_heads, met, logits]
    return [-(-size // _ALIGNED) * _ALIGNED for size in sizes]


def branch_places(spec: ModelSpec) -> int:
    """Sums of a branch that are added up apart, at most."""
    return 2 if any(one.norms is not None for _, one in spec.mixtures()) else 1
