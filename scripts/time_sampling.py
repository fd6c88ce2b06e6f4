"""Time the sampling kernels alone: each kind of row, numbers of rows and vocabularies; the device and the host.

    python scripts/time_sampling.py [--rows 1,16,64,256] [--vocab 32000,128256,151936] [--kinds all]

Needs an NVIDIA card. Logits are normal with a standard deviation of 1, as those of random weights, so that truncations
by mass leave many ids: `peaked` ones have four times that. Prints microseconds a step: the device's, by replaying a
graph of the step's kernels, and the host's, from the step's records to the last launch. Greedy rows start nothing.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from realizar.backends.cuda.device import open_device
from realizar.backends.cuda.sampling.native_choices import NativeChoiceMaker
from realizar.backends.cuda.sampling.native_kernels import SamplingKernels
from realizar.backends.cuda.step import WantedTokens
from realizar.backends.cuda.workspace import LOGIT_BLOCK
from realizar.batch import OpenedRow, StepRows
from realizar.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "min_p": {"min_p": 0.05},
    "typical": {"typical_p": 0.9},
    "sigma": {"top_n_sigma": 1.5},
    "xtc": {"xtc_probability": 0.5},
    "mirostat": {"mirostat": 2},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
    "bias": {"temperature": 0.0, "logit_bias": {5: 1.0}},
    "dry": {"temperature": 0.0, "dry_multiplier": 0.8},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
CONTEXT, HISTORY, REPLAYS = 4096, 512, 20


class Arrays(dict[str, torch.Tensor]):
    """A step's arrays, as far as the sampler reads them."""

    def __init__(self, rows: int) -> None:
        super().__init__(ids=torch.zeros(rows, dtype=torch.int32, device="cuda"))
        self.sizes = SimpleNamespace(rows=rows, selected=rows)


def make_space(rows: int, vocab: int, spread: float) -> Any:
    """A step's logits, and what the head's kernels leave of them."""
    blocks = -(-vocab // LOGIT_BLOCK)
    logits = torch.randn((rows, vocab), device="cuda") * spread
    padded = torch.nn.functional.pad(logits, (0, blocks * LOGIT_BLOCK - vocab), value=float("-inf"))
    tops = padded.view(rows, blocks, LOGIT_BLOCK).max(dim=2)
    ids = tops.indices + torch.arange(blocks, device="cuda") * LOGIT_BLOCK
    return SimpleNamespace(
        arrays=Arrays(rows),
        logits=logits,
        block_tops=tops.values.contiguous(),
        block_ids=ids.int().contiguous(),
        choices=logits.argmax(dim=1).int(),
        last=torch.zeros(rows, dtype=torch.int32, device="cuda"),
    )


def make_step(rows: int) -> Any:
    numbers = np.arange(rows)
    computed, ids = np.full(rows, HISTORY - 1, np.int32), np.zeros(rows, np.int32)
    columns = StepRows.of_decodes(numbers, numbers, computed, ids)
    wanted = WantedTokens(numbers.tolist(), numbers.tolist(), [0] * rows, rows, numbers.tolist(), 0)
    return SimpleNamespace(wanted=wanted, masks={}, forward_input=SimpleNamespace(columns=columns))


def time_kind(maker: NativeChoiceMaker, options: dict[str, Any], rows: int) -> tuple[float, float]:
    """Microseconds of the device and of the host."""
    history = tuple(np.random.default_rng(1).integers(0, 1000, HISTORY).tolist())
    for row in range(rows):
        maker.open(OpenedRow(row, row, SamplingParams(seed=row, **options), history, HISTORY, 0))
    step, part = make_step(rows), range(rows)

    def run() -> None:
        maker.make(step)
        maker.start_logprobs(step, part)

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        run()
    host = (time.perf_counter() - start) / REPLAYS
    torch.cuda.synchronize()
    device = time_device(maker, step, options)
    for row in range(rows):
        maker.close(row)
    return 1e6 * device, 1e6 * host


def time_device(maker: NativeChoiceMaker, step: Any, options: dict[str, Any]) -> float:
    """Seconds of the step's kernels."""
    numbers = step.forward_input.columns.numbers
    none = np.zeros_like(numbers)
    count, flags = maker._send_choices(step, numbers, none, none + HISTORY, none)
    logprobs = options.get("logprobs")
    if not count and logprobs is None:
        return 0.0
    lines = torch.empty((len(numbers), 3 + 2 * (logprobs or 0)), dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if count:
            maker._prepare(count, flags)
            maker._pick(count, flags, None, drafted=False)
        if logprobs is not None:
            maker._kernels.logprobs(maker._buffers, lines, logprobs)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / REPLAYS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--vocab", default="32000,128256,151936")
    parser.add_argument("--kinds", default="all")
    parser.add_argument("--spread", type=float, nargs="*", default=[1.0, 4.0], help="standard deviations of logits")
    given = parser.parse_args()
    kinds = list(KINDS) if given.kinds == "all" else given.kinds.split(",")
    card = open_device()
    print("| logits' spread | vocabulary | rows | kind | device us | host us |\n|---|---|---|---|---|---|")
    for spread in given.spread:
        for vocab in map(int, given.vocab.split(",")):
            kernels = SamplingKernels(card.torch_device, vocab, dependent=card.has_dependent_launch)
            for rows in map(int, given.rows.split(",")):
                maker = NativeChoiceMaker(make_space(rows, vocab, spread), CONTEXT, kernels)
                for kind in kinds:
                    device, host = time_kind(maker, KINDS[kind], rows)
                    print(f"| {spread:g} | {vocab} | {rows} | {kind} | {device:.1f} | {host:.1f} |", flush=True)


if __name__ == "__main__":
    main()
