"""Processor time of one layer's mixture of experts, part by part, on one thread: the best of several runs.

    python scripts/time_experts.py SHAPE [TYPE] [TOKENS]

SHAPE as olmoe-7b, TYPE of its matrices as Q4_K, TOKENS as 1,16,512. Random weights lie in memory. What the thread waits
for other programs does not count, so that a busy machine gives nearly the figures of a quiet one.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from realizar.backends.cpu.kernels.routing import COUNT_EXPERTS
from realizar.backends.cpu.operations import BoundOperation, BoundProgram
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.devices import THE_CPU
from realizar.backends.select import resolve_model
from realizar.bench.profile import StepWork, one_step, open_rows
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.config import EngineConfig
from realizar.models.generated import generate
from realizar.models.generated.shapes import SHAPES
from realizar.models.spec import Experts

REPEATS = 5
EXPERT_PARTS = ("router", "choice of experts", "expert gate and up", "expert activation", "expert down",
                "sum over experts")  # fmt: skip


def one_layer(shape_name: str, weight_type: GGMLType) -> Checkpoint:
    """A model of a shape with one layer and a small vocabulary."""
    shape = replace(SHAPES[shape_name], num_layers=1, vocab_size=512)
    path = Path("random.gguf")
    tensors: dict[str, StoredTensor] = {}
    for tensor in generate._tensors(shape, weight_type, 0):
        data = np.ascontiguousarray(tensor.data() if callable(tensor.data) else tensor.data).view(np.uint8).reshape(-1)
        tensors[tensor.name] = StoredTensor(tensor.name, tensor.ggml_type, tuple(tensor.shape), data, path, 0)
    return Checkpoint(path, "gguf", generate._metadata(shape, shape_name, weight_type), tensors)


def best_seconds(backend: CPUBackend, operations: list[BoundOperation]) -> dict[str, float]:
    """The least processor time of each part of the mixture, the operations run in order."""
    alone = [BoundProgram([operation]) for operation in operations]
    best = [float("inf")] * len(alone)
    for _ in range(REPEATS):
        for index, program in enumerate(alone):
            start = time.thread_time()
            backend.walk(program)
            best[index] = min(best[index], time.thread_time() - start)
    totals = dict.fromkeys(EXPERT_PARTS, 0.0)
    for operation, seconds in zip(operations, best, strict=True):
        if operation.part in totals:
            totals[operation.part] += seconds
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description="Processor time of one layer's mixture of experts on one thread.")
    shapes = sorted(name for name, shape in SHAPES.items() if shape.num_experts)
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("type", nargs="?", default="Q4_K", help="of all matrices; default Q4_K")
    parser.add_argument("tokens", nargs="?", default="1,16,64,512", help="of steps, with commas between")
    given = parser.parse_args()
    counts = [int(each) for each in given.tokens.split(",")]
    checkpoint = one_layer(given.shape, GGMLType[given.type])
    most = max(counts)
    config = EngineConfig(
        device="cpu", threads=1, max_step_tokens=most, max_running=1, context_length=most, kv_cache_bytes=1 << 30
    )
    spec, resolved = resolve_model(checkpoint, config, THE_CPU)
    backend = CPUBackend()
    backend.load(spec, checkpoint, resolved)
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, Experts)
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, most, np.int32)
    for tokens in counts:
        step = one_step(backend.capacity(), StepWork(1, tokens, 0), ids[:tokens])
        open_rows(backend, step)
        backend.submit(step)
        totals = best_seconds(backend, list(backend.programs[0].operations))
        matrix = tokens * experts.experts_per_token * spec.hidden_size * experts.up.out_features / 1e9
        gate_and_up, down = 2 * matrix / totals["expert gate and up"], matrix / totals["expert down"]
        chosen = int(backend.model.workspace.routing.counts[COUNT_EXPERTS])
        parts = ", ".join(f"{part} {seconds * 1e6:.0f}" for part, seconds in totals.items())
        print(f"{tokens} tokens, {chosen} experts, microseconds: {parts}")
        print(f"    gate and up {gate_and_up:.0f}, down {down:.0f} G multiply-adds/s", flush=True)
    backend.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
