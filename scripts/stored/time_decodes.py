"""Decodes of one shape on the CPU, stored as checkpoints' makers publish it and in GGUF's types, by turns.

    python scripts/stored/time_decodes.py --pairs awq:q4_1,gptq:q4_1,fp8:q8_0 --rounds 15

Weights are random, made in memory as for cuda_bench.py. Both of a pair have the head in bf16, as it is in checkpoints.
All engines stay loaded in one process, and each round has a run of every one, in turn from either end, so that a
machine's slow moments meet both. Prints each pair's ratio of tokens a second: the median of all rounds, and the
quarters beside it. Where other programs run beside, `--threads 1 --processor-time` takes tokens of a second of the
processor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuda_bench import METHODS, random_checkpoint

from realizar.bench.throughput import measure
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import load_core
from realizar.models.generated.shapes import SHAPES
from realizar.scheduler.pace import Policy

_TABLES = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


def made(shape: str, name: str, stored: Checkpoint) -> Checkpoint:
    """A method's checkpoint, or a GGUF file of a type with the embedding and head of `stored`."""
    if name in METHODS:
        return random_checkpoint(shape, name)
    found = random_checkpoint(shape, GGMLType[name.upper()])
    tables = {own: stored.tensors[table] for own, table in _TABLES.items() if table in stored.tensors}
    others = {own: replace(table, name=own, dtype="") for own, table in tables.items()}
    return replace(found, tensors={**found.tensors, **others})


def opened(checkpoint: Checkpoint, threads: int | None, tokens: int) -> EngineCore:
    config = EngineConfig(device="cpu", threads=threads, max_running=1, context_length=tokens + 64, prefix_cache=False)
    core = load_core(checkpoint, config, policy=Policy("prefill"))
    measure(core, batch=1, prompt_tokens=1, gen_tokens=4)
    return core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-1b", choices=sorted(SHAPES))
    parser.add_argument("--pairs", default="awq:q4_1,gptq:q4_1,fp8:q8_0")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=16, help="of a run")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    pairs = [tuple(pair.split(":")) for pair in arguments.pairs.split(",")]
    stored = random_checkpoint(arguments.shape, "awq")
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    cores = {name: opened(made(arguments.shape, name, stored), arguments.threads, arguments.tokens) for name in names}
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name in names if number % 2 else names[::-1]:
            start = time.process_time()
            times = measure(cores[name], batch=1, prompt_tokens=1, gen_tokens=arguments.tokens, seed=number)
            of_processor = (arguments.tokens + 1) / (time.process_time() - start)  # the prompt's token is a step too
            speeds[name].append(of_processor if arguments.processor_time else times.decode_tokens_per_s)
    for name in names:
        print(f"{name:>6} {statistics.median(speeds[name]):8.2f} tokens/s")
    for one, other in pairs:
        low, middle, high = statistics.quantiles(
            [own / its for own, its in zip(speeds[one], speeds[other], strict=True)], n=4
        )
        print(f"{one} by {other}: {middle:.3f} ({low:.3f} to {high:.3f})")
    for core in cores.values():
        core.close()


if __name__ == "__main__":
    main()
