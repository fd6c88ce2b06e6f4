"""Compares a generated model on several GPUs with one: log-probabilities, greedy texts, and tokens/s.

    python scripts/replicas/time_ranks.py --shape llama-8b --ranks 1,2 --batches 1,64 --prefill 2048
    python scripts/replicas/time_ranks.py --shape llama-70b --layers 20 --ranks 2 --folder /dev/shm --kill

The model has the shapes and types of a real one, and random weights; layers' matrices of one shape and type have the
same bytes. The exit status is 1 where the texts of two runs differ, or log-probabilities by more than numbers round.
`--kill` ends the last rank of each engine with SIGKILL amid a step, and tells in how many seconds its request failed.
`--profile` prints the first rank's device time by kernel; one that reads sums over ranks waits for the others in it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from realizar.backends.ranks.backend import RankedBackend
from realizar.bench.throughput import measure, next_tokens
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import EngineDeadError
from realizar.models.generated import generate
from realizar.models.generated.shapes import SHAPES, Shape
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from cuda_bench import decode_rate, profile, random_checkpoint

_NEAR = 0.05  # mean difference of log-probabilities in nats, of activations in 8 bits
_SHAPES = SHAPES | {"llama-70b": Shape("llama", 80, 8192, 28672, 64, 8, 128, 128256, False, 5e5, 1e-5, 131072)}


def write_model(shape: str, layers: int, path: Path) -> None:
    """A file of the shape, or of its first layers."""
    SHAPES[shape] = replace(_SHAPES[shape], num_layers=layers or _SHAPES[shape].num_layers)
    made = random_checkpoint(shape, generate.file_type_of(shape))
    tensors = [
        NewTensor(name, each.ggml_type, each.shape, each.data)
        for name, each in made.tensors.items()
        if each.ggml_type is not None
    ]
    write_gguf(path, made.metadata, tensors)


def load(path: Path, ranks: int, arguments: argparse.Namespace) -> EngineCore:
    batches, prompts = arguments.batches, arguments.prefill
    config = EngineConfig(
        device="cuda", tensor_parallel=ranks, max_running=max(batches), max_step_tokens=max([*prompts, 512]),
        context_length=max([*prompts, 512]) + 64, prefix_cache=False, batch_invariant=arguments.batch_invariant,
        graphs=not arguments.no_graphs, device_check=False,
    )  # fmt: skip
    started = time.perf_counter()
    core = load_core(find_checkpoint(path), config, policy=Policy("prefill"))
    sizes = f"{core.capacity.weight_bytes / 1e9:.2f} GB of weights, blocks {core.capacity.num_blocks}"
    print(f"{ranks} GPUs: loaded in {time.perf_counter() - started:.1f} s, {sizes}", flush=True)
    return core


def answer(core: EngineCore, length: int, count: int) -> tuple[list[int], list[float]]:
    """Tokens of a greedy text, and log-probabilities of its prompt's."""
    draw = random.Random(7)
    prompt = tuple(draw.randrange(core.spec.vocab_size) for _ in range(length))
    core.add(Request("text", prompt, SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=1), count))
    tokens: list[int] = []
    logprobs: list[float] = []
    while core.has_work:
        deltas = core.step()
        tokens += deltas.token_list()
        logprobs += [entry.logprob for part in deltas.prompt_logprobs for entry in part.entries]
    return tokens, logprobs


def kill_amid(core: EngineCore) -> float:
    """Seconds from SIGKILL of the last rank to the engine's end."""
    backend = core._backend
    assert isinstance(backend, RankedBackend)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(backend._others[-1].process.pid, signal.SIGKILL)

    core.add(Request("killed", (1, 2, 3), SamplingParams(temperature=0.0, ignore_eos=True), 500))
    threading.Timer(0.3, kill).start()
    try:
        while core.has_work:
            core.step()
    except EngineDeadError as error:
        print(f"killed: {error}", flush=True)
        return time.perf_counter() - killed[0]
    raise RuntimeError("the request ended before its engine")


def compare(path: Path, ranks: int, arguments: argparse.Namespace, first: list[float]) -> tuple[bool, list[float]]:
    """Whether an engine of so many GPUs has one text, with log-probabilities near the first one's, if any; and its."""
    core = load(path, ranks, arguments)
    try:
        tokens, logprobs = answer(core, 200, 100)
        again, _ = answer(core, 200, 100)
        apart = np.abs(np.subtract(logprobs, first or logprobs))
        same = "the same" if tokens == again else "ANOTHER"
        far = f"{apart.mean():.4f} apart, {apart.max():.3f} at most"
        print(f"{ranks} GPUs: {same} text again; log-probabilities {far}: {tokens[:8]}", flush=True)
        for batch in arguments.batches:
            rate, _ = decode_rate(core, batch, 1 if batch == 1 else 128, next_tokens(core.spec, batch))
            print(f"{ranks} GPUs: decode {batch}: {rate:.0f} tokens/s", flush=True)
        for prompt in arguments.prefill:
            measure(core, batch=1, prompt_tokens=prompt, gen_tokens=1)
            runs = [measure(core, batch=1, prompt_tokens=prompt, gen_tokens=1, seed=seed) for seed in range(3)]
            rate = sorted(run.prefill_tokens_per_s for run in runs)[1]
            print(f"{ranks} GPUs: prefill {prompt}: {rate:.0f} tokens/s", flush=True)
        if arguments.profile:
            for batch in arguments.batches:
                profile(core, batch, 1 if batch == 1 else 128, 32, next_tokens(core.spec, batch))
            for prompt in arguments.prefill:
                profile(core, 1, prompt, 1, next_tokens(core.spec, 1))
        if arguments.kill and ranks > 1:
            print(f"{ranks} GPUs: {kill_amid(core):.2f} s from SIGKILL to the end", flush=True)
    finally:
        core.close()
    return tokens == again and float(apart.mean()) < _NEAR, logprobs


def free_megabytes(ranks: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    gc.collect()
    return np.array([torch.cuda.mem_get_info(index)[0] / 1e6 for index in range(ranks)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(_SHAPES))
    parser.add_argument("--layers", type=int, default=0, help="of the shape's, by default all")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2])
    parser.add_argument("--batches", type=_numbers, default=[1, 64])
    parser.add_argument("--prefill", type=_numbers, default=[2048])
    parser.add_argument("--folder", help="of the model's file; by default that of temporary files")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    all_near, first = True, list[float]()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "random.gguf"
        started = time.perf_counter()
        write_model(arguments.shape, arguments.layers, path)
        print(f"wrote {path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s", flush=True)
        for ranks in arguments.ranks:
            before = free_megabytes(ranks)
            is_near, logprobs = compare(path, ranks, arguments, first)
            all_near, first = all_near and is_near, first or logprobs
            kept = before - free_megabytes(ranks)
            print(f"{ranks} GPUs: MB kept once closed: {', '.join(f'{each:.0f}' for each in kept)}", flush=True)
    return 0 if all_near else 1


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
