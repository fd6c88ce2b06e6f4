"""Time the sampling kernels alone: each kind of row, numbers of rows and vocabularies; the device and the host.

    python scripts/sampling/time_sampling.py [--rows 1,16,64,256] [--vocab 32000,128256,151936] [--kinds all]

Needs an NVIDIA card. Logits are normal with a standard deviation of 1, as those of random weights, so that truncations
by mass leave many ids: `peaked` ones have four times that. Prints microseconds a step: the device's, by replaying the
graphs of the step's kernels, and the host's, until the last launch. Greedy rows start nothing.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from realizar.backends.cuda.device import open_device
from realizar.backends.cuda.sampling.native_kernels import SamplingKernels
from realizar.backends.cuda.sampling.native_step_sampler import RESULT_BYTES, HostCopies, NativeStepSampler
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
    """A step's arrays, as far as the sampler reads them: each row decodes."""

    def __init__(self, rows: int) -> None:
        numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
        super().__init__(ids=torch.zeros_like(numbers), selected_rows=numbers, contexts=numbers * 0 + HISTORY)
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
        sampled=logits.argmax(dim=1).int(),
        last=torch.zeros(rows, dtype=torch.int32, device="cuda"),
    )


def make_step(rows: int) -> Any:
    numbers = np.arange(rows)
    computed, ids = np.full(rows, HISTORY - 1, np.int32), np.zeros(rows, np.int32)
    columns = StepRows.of_decodes(numbers, numbers, computed, ids)
    wanted = WantedTokens(numbers.tolist(), numbers.tolist(), [0] * rows, rows, numbers.tolist(), 0)
    return SimpleNamespace(wanted=wanted, masks={}, held=frozenset(), forward_input=SimpleNamespace(columns=columns))


def open_rows(maker: NativeStepSampler, options: dict[str, Any], rows: int) -> None:
    history = tuple(np.random.default_rng(1).integers(0, 1000, HISTORY).tolist())
    for row in range(rows):
        maker.open(OpenedRow(row, row, SamplingParams(seed=row, **options), history, HISTORY, 0))


def time_kind(maker: NativeStepSampler, options: dict[str, Any], rows: int) -> tuple[float, float]:
    """Microseconds of the device and of the host."""
    open_rows(maker, options, rows)
    step, part, copies = make_step(rows), range(rows), HostCopies(RESULT_BYTES * rows, torch.device("cuda"))

    def run() -> None:
        copies.begin()
        maker.make(step)
        maker.start_logprobs(step, part, copies.copy)

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


def time_device(maker: NativeStepSampler, step: Any, options: dict[str, Any]) -> float:
    """Seconds of the step's kernels, by replaying graphs of them."""
    columns, logprobs = step.forward_input.columns, options.get("logprobs")
    numbers, positions = columns.numbers, columns.num_context_tokens
    flags = maker._rows.flags_of(numbers, positions)
    sampler = maker._graphs.find(len(numbers), flags) if flags else None
    lines = torch.empty((len(numbers), 3 + 2 * (logprobs or 0)), dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    listing = torch.cuda.CUDAGraph()
    if logprobs is not None:
        with torch.cuda.graph(listing):
            maker._kernels.logprobs(maker._buffers, lines, logprobs)
    graphs = [graph for graph in (sampler, listing if logprobs is not None else None) if graph is not None]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for replay in range(REPLAYS + 1):
        if replay == 1:
            start.record()
        for graph in graphs:
            graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / REPLAYS if graphs else 0.0


def profile_kind(maker: NativeStepSampler, options: dict[str, Any], rows: int) -> str:
    """Microseconds of each kernel, from the end of all before it to its own: a kernel starts while another ends."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    open_rows(maker, options, rows)
    step, part, copies = make_step(rows), range(rows), HostCopies(RESULT_BYTES * rows, torch.device("cuda"))
    maker.make(step)
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(REPLAYS):
            copies.begin()
            maker.make(step)
            maker.start_logprobs(step, part, copies.copy)
        torch.cuda.synchronize()
    events = [each for each in recorded.profiler.kineto_results.events() if each.device_type() == DeviceType.CUDA]
    times: dict[str, float] = {}
    ended_ns = 0
    for event in sorted(events, key=lambda each: each.start_ns() + each.duration_ns()):
        end_ns = event.start_ns() + event.duration_ns()
        exposed_ns = end_ns - max(event.start_ns(), ended_ns)
        times[event.name()] = times.get(event.name(), 0.0) + exposed_ns / 1e3 / REPLAYS
        ended_ns = end_ns
    for row in range(rows):
        maker.close(row)
    return ", ".join(f"{name.partition('(')[0]} {time_us:.1f}" for name, time_us in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--vocab", default="32000,128256,151936")
    parser.add_argument("--kinds", default="all")
    parser.add_argument("--spread", type=float, nargs="*", default=[1.0, 4.0], help="standard deviations of logits")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel too")
    given = parser.parse_args()
    kinds = list(KINDS) if given.kinds == "all" else given.kinds.split(",")
    card = open_device()
    print("| logits' spread | vocabulary | rows | kind | device us | host us |\n|---|---|---|---|---|---|")
    for spread in given.spread:
        for vocab in map(int, given.vocab.split(",")):
            kernels = SamplingKernels(card.torch_device, vocab, dependent=card.has_dependent_launch)
            for rows in map(int, given.rows.split(",")):
                maker = NativeStepSampler(make_space(rows, vocab, spread), CONTEXT, kernels)
                maker.capture()
                for kind in kinds:
                    device, host = time_kind(maker, KINDS[kind], rows)
                    print(f"| {spread:g} | {vocab} | {rows} | {kind} | {device:.1f} | {host:.1f} |", flush=True)
                    if given.profile:
                        print(f"    {profile_kind(maker, KINDS[kind], rows)}", flush=True)


if __name__ == "__main__":
    main()
