"""Times an encoder of images on a GPU, of random weights in the shape of a published one, beside the card's bound.

    python scripts/tower/time_tower.py --grids 64x64,32x48,128x128
    python scripts/tower/time_tower.py --shape gemma4-31b --grids 42x60 --profile

A grid is rows and columns of patches. Of each: ms of the graph alone, and of `encode` with the copies of pixels and
features; the share of the time that its products and attention would take at 800 TFLOP/s. With `--check` the features
of the first grid are compared with the CPU's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from random_towers import GEMMA4_31B, GEMMA4_E2B, QWEN3_VL_8B, SMALL, flops, gemma4v, qwen3vl, random_picture

from realizar.backends.cuda.tower import CUDATower
from realizar.models.registry import build_tower

BOUND = 800e12  # FLOP/s of products in 16 bits that an H200 can reach
SHAPES = {
    "qwen3vl-8b": partial(qwen3vl, **QWEN3_VL_8B), "gemma4-31b": partial(gemma4v, **GEMMA4_31B),
    "gemma4-e2b": partial(gemma4v, **GEMMA4_E2B), "small": partial(qwen3vl, **SMALL),
}  # fmt: skip


def median_ms(run: Any, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times)


def graph_ms(encoder: CUDATower, rows: int, columns: int, rounds: int) -> float:
    """Of the kernels alone, from event to event, in the clock that the card holds."""
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        encoder.start(rows, columns)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def print_profile(encoder: CUDATower, rows: int, columns: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        encoder.start(rows, columns)
        torch.cuda.synchronize()
    listed = sorted(found.key_averages(), key=lambda each: -each.self_device_time_total)
    for each in listed[:16]:
        print(f"  {each.self_device_time_total / 1e3:8.3f} ms {each.count:5} x  {each.key[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", default="64x64")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3vl-8b")
    for name in ("check", "profile"):
        parser.add_argument(f"--{name}", action="store_true")
    asked = parser.parse_args()
    checkpoint = SHAPES[asked.shape]()
    tower = build_tower(checkpoint)
    assert tower is not None
    encoder = CUDATower(tower, checkpoint, torch.device("cuda", 0))
    print(f"{torch.cuda.get_device_name()}, {encoder.size_bytes / 1e6:,.0f} MB of weights and buffers", flush=True)
    grids = [tuple(map(int, grid.split("x"))) for grid in asked.grids.split(",")]
    if asked.check:
        from realizar.backends.cpu.tower import CPUTower
        from realizar.images.prepare import patches_of

        picture = random_picture(*grids[0])
        wanted = CPUTower(tower, checkpoint, threads=8).encode(patches_of(tower, picture))
        for _ in range(3):
            found = encoder.encode(picture)
            print(f"apart from the CPU: {np.linalg.norm(found - wanted) / np.linalg.norm(wanted):.2e} of the norm")
    for rows, columns in grids:
        picture = random_picture(rows, columns)
        first_ms, second_ms = (median_ms(lambda: encoder.encode(picture), 1) for _ in range(2))  # noqa: B023
        whole_ms = median_ms(lambda: encoder.encode(picture), asked.rounds)  # noqa: B023
        alone_ms, work = graph_ms(encoder, rows, columns, asked.rounds), flops(tower, rows * columns)
        print(
            f"{rows} x {columns} patches: {alone_ms:.2f} ms, {work / 1e12:.2f} TFLOP, {work / alone_ms / 1e9:.0f}"
            f" TFLOP/s, {work / BOUND * 1e3 / alone_ms:.0%} of the bound; encode {whole_ms:.1f} ms, the first"
            f" {first_ms:.0f}, with its capture {second_ms:.0f}",
            flush=True,
        )  # fmt: skip
        if asked.profile:
            print_profile(encoder, rows, columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
