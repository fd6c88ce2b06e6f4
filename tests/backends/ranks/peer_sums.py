"""A rank of sums over peer memory: `peer_sums.py RANK RANKS FOLDER`. On a GPU each, or interpreted without any.

It holds sums, streams and norms against float64 and leaves a digest of all bits in the folder, which is the same for
all ranks; then it waits for a rank that sends nothing, which must end.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from backends.cuda import triton_interpreter  # noqa: F401
from realizar.backends.cuda.kernel_sizes import norm_blocks, norm_square_parts, whole_width
from realizar.backends.cuda.kernels.exchange import share_sums
from realizar.backends.cuda.kernels.normalize import normalize, normalize_block
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.cuda.ranks.peers import PeerMemory, Region, share_memory

SCALE, EPS = 0.5, 1e-5
SPLITS = 2
WIDTHS_AND_ROWS = {True: ((8192, 2048, 4096), (1, 2, 7, 16, 33, 64, 2048)), False: ((192,), (1, 3))}
REPEATS = 1000


@dataclass
class Case:
    """Sums of one size: `start` sums to `hidden` and `normed`; all ranks' inputs are made from their numbers."""

    tokens: int
    width: int
    halves: bool
    device: torch.device

    def inputs(self, rank: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(100 + rank)
        made = torch.randn((SPLITS, self.tokens, self.width), generator=generator, device=self.device)
        return made.half() if self.halves else made

    def stream(self) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(7)
        return torch.randn((self.tokens, self.width), generator=generator, device=self.device)

    def weight(self) -> torch.Tensor:
        return torch.linspace(-1.0, 2.0, self.width, device=self.device)

    def expected(self, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream and its norm in float64."""
        total = torch.zeros((self.tokens, self.width), dtype=torch.float64, device=self.device)
        for rank in range(ranks):
            total += self.inputs(rank).double().sum(0) * (HALF_FACTOR.value if self.halves else 1.0)
        total += self.weight().double()  # the bias of the first rank
        hidden = self.stream().double() + SCALE * total
        return hidden, hidden / (hidden.square().mean(1, keepdim=True) + EPS).sqrt() * self.weight().double()


def store_of(folder: Path, rank: int, ranks: int) -> Callable[[bytes], Sequence[bytes]]:
    """All ranks' bytes, through a file."""
    store, turns = distributed.FileStore(str(folder / "peers"), ranks), iter(range(1 << 30))

    def exchange(own: bytes) -> list[bytes]:
        turn = next(turns)
        store.set(f"{turn}-{rank}", own + b".")
        return [bytes(store.get(f"{turn}-{other}"))[:-1] for other in range(ranks)]

    return exchange


class Word:
    """A word of the host on a page of its own."""

    def __init__(self) -> None:
        self._page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.int32)
        self.at = self._page.data_ptr()

    @property
    def value(self) -> int:
        return int(self._page[0])

    @value.setter
    def value(self, value: int) -> None:
        self._page[0] = value


_mapped = list[torch.Tensor]()


def mapped_memory(folder: Path, rank: int, ranks: int, num_bytes: int, word: Word, exchange: Any) -> PeerMemory:
    """Memory of all ranks without GPUs: files that each maps."""
    (folder / f"memory-{rank}").write_bytes(b"\xff" * num_bytes)
    exchange(b"")
    views = []
    for other in range(ranks):
        with (folder / f"memory-{other}").open("r+b") as file:
            views.append(torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int32))
    _mapped.extend(views)
    state = torch.tensor([rank, 1 << 30], dtype=torch.int32)
    addresses = [view.data_ptr() for view in views]
    return PeerMemory(rank, addresses, addresses[rank], state, word.at, word.at)


def start(
    case: Case, region: Region, ranks: int, at_once: bool, by_blocks: bool, buffers: dict[str, torch.Tensor]
) -> None:  # fmt: skip
    """Start what adds all ranks' sums to `hidden` and norms it."""
    sums, bias, none = buffers["sums"], buffers["bias"], buffers["none"]
    hidden, normed, weight, squares = (buffers[name] for name in ("hidden", "normed", "weight", "squares"))
    tokens, width, biased = case.tokens, case.width, bias is not none
    cut, parts, dependent = norm_blocks(width), norm_square_parts(width), {"DEPENDENT": False}
    if case.device.type == "cuda" and tokens <= 256:
        dependent = {"DEPENDENT": True, "launch_pdl": True}
    strides = sums.stride(0), sums.stride(1)
    if not at_once:
        share_sums[(tokens, cut.blocks)](
            sums, *strides, bias, width, region.parts(case.halves), region.to_totals, SPLITS=SPLITS, BIAS=biased,
            RANKS=ranks, HALVES=case.halves, BLOCK=cut.block, num_warps=cut.warps, **dependent,
        )  # fmt: skip
    constants = {
        "SPLITS": SPLITS, "MATMUL_BIAS": biased, "FORMAT": 0, "BLOCK_TOKENS": 1, "CHUNKS": 1, "PARTS": parts,
        "exchange": region.at_once(case.halves) if at_once else region.totals, "RANKS": ranks if at_once else 1,
        "HALVES": case.halves, **dependent,
    }  # fmt: skip
    if by_blocks:
        normalize_block[(tokens, cut.blocks)](
            sums, *strides, bias, SCALE, hidden, width, weight, normed, width, none, none, none, width, squares,
            squares, BLOCK=cut.block, num_warps=cut.warps, **constants,
        )  # fmt: skip
        return
    whole = whole_width(width)
    normalize[(tokens,)](
        sums, *strides, bias, none, none, none, 0.0, SCALE, 1.0, hidden, weight, none, EPS, normed, width, none, none,
        none, width, squares, BRANCH_NORM=0, BRANCH_BIAS=False, NORM=1, NORM_BIAS=False, GATHER=False,
        BLOCK=whole.block, num_warps=whole.warps, **constants,
    )  # fmt: skip


def check(case: Case, memory: PeerMemory, regions: Sequence[Region], digest: Any) -> None:
    """Both kernels, and both ways to add up, twice each; on a GPU captured as well, and a thousand times."""
    rank, ranks, device = memory.rank, memory.ranks, case.device
    hidden, normed = case.expected(ranks)
    none = torch.zeros(1, device=device)
    buffers = {
        "sums": case.inputs(rank), "bias": case.weight() if rank == 0 else none, "none": none, "weight": case.weight(),
        "squares": torch.zeros(case.tokens, norm_square_parts(case.width), device=device),
        "hidden": case.stream(), "normed": torch.empty(case.tokens, case.width, device=device),
    }  # fmt: skip
    most, size = regions[0].most_at_once(ranks, case.tokens, case.width), hidden.abs().max().item()
    ways = ((at_once, by_blocks) for at_once in (True, False) for by_blocks in (False, True))

    before = case.stream()

    def once(at_once: bool, by_blocks: bool, turn: int) -> None:
        buffers["hidden"].copy_(before)
        buffers["normed"].fill_(torch.nan)
        start(case, regions[turn % 2], ranks, at_once, by_blocks, buffers)

    for at_once, by_blocks in ways:
        if at_once and case.tokens > most:
            continue
        found = []
        for turn in range(2):
            once(at_once, by_blocks, turn)
            found.append((buffers["hidden"].clone(), buffers["normed"].clone()))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        bound = size * (2**-10 if case.halves else 2**-21)
        error = (found[0][0].double() - hidden).abs().max().item()
        assert error <= bound, (case, at_once, by_blocks, error, bound)
        of_norm = hidden * case.weight().double() if by_blocks else normed
        error = (found[0][1].double() - of_norm).norm() / of_norm.norm()
        assert error < (1e-3 if case.halves else 1e-6), (case, at_once, by_blocks, error)
        digest.update(found[0][0].cpu().numpy().tobytes() + found[0][1].cpu().numpy().tobytes())
        if device.type == "cuda":
            check_captured(once, at_once, by_blocks, buffers, found[0])


def check_captured(once: Any, at_once: bool, by_blocks: bool, buffers: Any, expected: Any) -> None:
    """A graph of four, replayed many times, gives the bits of launches, also where ranks do not keep step."""
    graph = torch.cuda.CUDAGraph()
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for turn in range(4):
            once(at_once, by_blocks, turn)
            wrong.add_((buffers["hidden"] != expected[0]).sum() + (buffers["normed"] != expected[1]).sum())
    for replay in range(REPEATS // 4 if expected[0].shape[0] <= 64 else 4):
        if replay % 16 == 3:
            torch.cuda._sleep(200_000 * (1 + torch.cuda.current_device()))
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0, (at_once, by_blocks, wrong.item())


def check_alone(case: Case, memory: PeerMemory, region: Region, word: Word) -> None:
    """A rank whose others send nothing ends with a word that says so; it ends soon where the host says so."""
    none = torch.zeros(1, device=case.device)
    buffers = {
        "sums": case.inputs(0), "bias": none, "none": none, "weight": case.weight(), "hidden": case.stream(),
        "squares": torch.zeros(case.tokens, 64, device=case.device),
        "normed": torch.empty(case.tokens, case.width, device=case.device),
    }  # fmt: skip
    memory.state[1] = 5000 if case.device.type == "cuda" else 50
    for _ in range(3):
        start(case, region, memory.ranks, True, True, buffers)
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    assert word.value == 1
    if case.device.type != "cuda":
        return
    memory.state[1] = (1 << 30) - 1
    word.value = 0
    start(case, region, memory.ranks, True, False, buffers)
    time.sleep(0.2)
    assert not torch.cuda.current_stream().query()
    word.value = 1
    torch.cuda.synchronize()


def main(rank: int, ranks: int, folder: Path) -> None:
    on_cards = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_cards else torch.device("cpu")
    if on_cards:
        torch.cuda.set_device(rank)
        torch.zeros(1, device=device)
    widths, rows = WIDTHS_AND_ROWS[on_cards]
    num_bytes, exchange = 2 * Region.size_bytes(ranks, rows[-1], max(widths)), store_of(folder, rank, ranks)
    word = Word()
    memory = (
        share_memory(num_bytes, rank, device, word.at, exchange)
        if on_cards
        else mapped_memory(folder, rank, ranks, num_bytes, word, exchange)
    )
    assert memory is not None
    memory.state[1] = (1 << 24) - 1
    digest = hashlib.sha256()
    for width in widths:
        for tokens in rows:
            case = Case(tokens, width, False, device)
            in_halves = [Case(tokens, width, True, device)] if tokens >= 64 or not on_cards else []
            for sized in (case, *in_halves):
                size = Region.size_bytes(ranks, tokens, width)
                check(sized, memory, [Region(memory, at, tokens, width) for at in (0, size)], digest)
                if on_cards:
                    torch.cuda.synchronize()
                assert word.value == 0
                exchange(b"")  # the places of the next size lie elsewhere
                sys.stdout.write(f"rank {rank}: {tokens} x {width}{' in halves' * sized.halves}\n")
                sys.stdout.flush()
    (folder / f"digest-{rank}").write_text(digest.hexdigest())
    if rank == 0:
        check_alone(case, memory, Region(memory, 0, case.tokens, case.width), word)
    exchange(b"")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
