"""Times a branch's sums over GPUs, with the addition to the stream and its norm: microseconds each, in a graph.

Beside it the norm of this GPU's sums alone, and NCCL's all-reduce of float32 and bf16 followed by the norm.

    python scripts/ranks/time_sums.py [--ranks 2] [--width 8192] [--rows 1,8,64,2048] [--only 1-shot]
"""

from __future__ import annotations

import argparse
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from realizar.backends.cuda.kernel_sizes import norm_blocks, norm_square_parts, whole_width
from realizar.backends.cuda.kernels.exchange import add_up_sums, share_sums
from realizar.backends.cuda.kernels.normalize import normalize, normalize_block
from realizar.backends.cuda.matmul.inputs import InputFormat, make_buffer
from realizar.backends.cuda.ranks.peers import Region, share_memory

IN_GRAPH, REPLAYS = 40, 15
SPLITS = 4
DEPENDENT_TOKENS = 256


class Norms:
    """The kernels that add sums of [SPLITS, tokens, width] to a stream and norm it."""

    def __init__(self, tokens: int, width: int) -> None:
        self.tokens, self.width = tokens, width
        self.sums, self.hidden = torch.randn(SPLITS, tokens, width, device="cuda"), torch.zeros(tokens, width).cuda()
        self.total = torch.randn(1, tokens, width, device="cuda")
        self.weight, self.none = torch.ones(width, device="cuda"), torch.zeros(1, device="cuda")
        self.squares = torch.zeros(tokens, norm_square_parts(width), device="cuda")
        self.codes = make_buffer(InputFormat("int8"), width, tokens, torch.device("cuda"))
        self.bf16 = make_buffer(InputFormat("bf16"), width, tokens, torch.device("cuda"))
        self.dependent: dict[str, bool] = {"DEPENDENT": False}
        if tokens <= DEPENDENT_TOKENS:
            self.dependent = {"DEPENDENT": True, "launch_pdl": True}

    def whole(self, sums: torch.Tensor, **exchange: Any) -> None:
        """Into bf16."""
        cut, none = whole_width(self.width), self.none
        normalize[(self.tokens,)](
            sums, sums.stride(0), sums.stride(1), none, none, none, none, 0.0, 1e-3, 1.0, self.hidden, self.weight,
            none, 1e-5, *self.bf16.pointers(), self.width, self.squares, SPLITS=len(sums), MATMUL_BIAS=False,
            BRANCH_NORM=0, BRANCH_BIAS=False, NORM=1, NORM_BIAS=False, GATHER=False, PARTS=self.squares.shape[1],
            BLOCK=cut.block, num_warps=cut.warps, **self.bf16.constants(), **self.dependent, **exchange,
        )  # fmt: skip

    def blocks(self, sums: torch.Tensor, **exchange: Any) -> None:
        """Into integers, of which the matmul applies the norm's scale."""
        cut = norm_blocks(self.width)
        normalize_block[(self.tokens, cut.blocks)](
            sums, sums.stride(0), sums.stride(1), self.none, 1e-3, self.hidden, self.width, self.weight,
            *self.codes.pointers(), self.width, self.squares, self.squares, SPLITS=len(sums), MATMUL_BIAS=False,
            PARTS=self.squares.shape[1], BLOCK=cut.block, num_warps=cut.warps, **self.codes.constants(),
            **self.dependent, **exchange,
        )  # fmt: skip

    def apart(self, region: Region, ranks: int) -> None:
        """Sums by blocks, then the norm of the whole token."""
        cut, sums = norm_blocks(self.width), self.sums
        add_up_sums[(self.tokens, cut.blocks)](
            sums, sums.stride(0), sums.stride(1), self.none, self.total, self.width, region.at_once(), SPLITS=SPLITS,
            BIAS=False, RANKS=ranks, HALVES=False, BLOCK=cut.block, num_warps=cut.warps, **self.dependent,
        )  # fmt: skip
        self.whole(self.total)

    def share(self, region: Region, ranks: int, halves: bool) -> None:
        cut, sums = norm_blocks(self.width), self.sums
        share_sums[(self.tokens, cut.blocks)](
            sums, sums.stride(0), sums.stride(1), self.none, self.width, region.parts(halves), region.to_totals,
            SPLITS=SPLITS, BIAS=False, RANKS=ranks, HALVES=halves, BLOCK=cut.block, num_warps=cut.warps,
            **self.dependent,
        )  # fmt: skip


def timed(run: Callable[[int], None]) -> float:
    """Microseconds of a run among many in a graph, the median of replays; `run` gets its number."""
    for turn in range(4):
        run(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for turn in range(IN_GRAPH):
            run(turn)
    found = list[float]()
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        distributed.barrier()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / IN_GRAPH)
    return float(median(found[3:]))


def ways(norms: Norms, regions: Sequence[Region], ranks: int) -> dict[str, Callable[[int], None]]:
    def at_once(start: Callable[..., None], halves: bool) -> Callable[[int], None]:
        return lambda turn: start(
            norms.sums, exchange=regions[turn % 2].at_once(halves), RANKS=ranks, HALVES=halves
        )  # fmt: skip

    def by_turns(start: Callable[..., None], halves: bool) -> Callable[[int], None]:
        def run(turn: int) -> None:
            norms.share(regions[turn % 2], ranks, halves)
            start(norms.sums, exchange=regions[turn % 2].totals, RANKS=1, HALVES=halves)

        return run

    def nccl(values: torch.Tensor) -> Callable[[int], None]:
        def run(turn: int) -> None:
            distributed.all_reduce(values)
            norms.whole(norms.total)

        return run

    return {
        "norm": lambda turn: norms.whole(norms.sums), "blocks": lambda turn: norms.blocks(norms.sums),
        "1-shot": at_once(norms.whole, False), "1-shot apart": lambda turn: norms.apart(regions[turn % 2], ranks),
        "1-shot blocks": at_once(norms.blocks, False), "1-shot halves": at_once(norms.blocks, True),
        "2-shot": by_turns(norms.whole, False), "2-shot halves": by_turns(norms.blocks, True),
        "NCCL f32": nccl(norms.total[0]), "NCCL bf16": nccl(norms.total[0].bfloat16()),
    }  # fmt: skip


def rank_main(given: argparse.Namespace, rows: Sequence[int]) -> None:
    rank, ranks, width = given.rank, given.ranks, given.width
    device = torch.device("cuda", rank)
    torch.cuda.set_device(rank)
    store = distributed.FileStore(f"{given.folder}/store", ranks)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks, store=store, device_id=device)
    words = iter(range(1 << 20))

    def exchange(own: bytes) -> list[bytes]:
        turn = next(words)
        store.set(f"word-{turn}-{rank}", own + b".")
        return [bytes(store.get(f"word-{turn}-{other}"))[:-1] for other in range(ranks)]

    size = Region.size_bytes(ranks, max(rows), width)
    page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.int32)
    memory = share_memory(2 * size, rank, device, page.data_ptr(), exchange)
    assert memory is not None
    for tokens in rows:
        norms = Norms(tokens, width)
        regions = [Region(memory, at, tokens, width) for at in (0, size)]
        runs = {name: run for name, run in ways(norms, regions, ranks).items() if given.only in name}
        if rank == 0 and tokens == rows[0]:
            sys.stdout.write("  ".join(["rows", *runs]) + "\n")
        found = []
        for name, run in runs.items():
            skipped = name.startswith("1-shot") and tokens > Region.most_at_once(ranks, tokens, width)
            found.append("-" if skipped else f"{timed(run):.2f}")
        if rank == 0:
            sys.stdout.write("  ".join([str(tokens), *found]) + "\n")
            sys.stdout.flush()
        torch.cuda.synchronize()
        distributed.barrier()
    assert int(page[0]) == 0
    distributed.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,2048")
    parser.add_argument("--only", default="", help="what the names of columns contain")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given, [int(count) for count in given.rows.split(",")])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--folder", folder]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(given.ranks)]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
