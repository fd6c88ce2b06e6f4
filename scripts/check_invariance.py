r"""Requests of all kinds, each alone and then beside many others: their tokens and log-probabilities, bit for bit.

    python scripts/check_invariance.py --shape llama-1b --type q4_k_m --device cuda
    python scripts/check_invariance.py --model smollm2:135m --device cpu --requests 32 --prompt-tokens 1-60
    python scripts/check_invariance.py --model smollm2:135m --device cpu --requests 48 --prompt-tokens 1-40 \
        --output-tokens 40-100 --preempt 2

A model of a shape has random weights and Llama 3's vocabulary. Beside others means: in another order, with requests
between them that are aborted, with prompts that begin alike and share cached blocks, and where --preempt says so with
room in the KV cache for so few of the longest requests that some are preempted and computed again. Prints the first
difference of each request that has one, and what ran beside it; the exit status is then 1, and also where nothing was
preempted that should have been.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from cuda_serve import write_model

from realizar.backends.select import plan_memory, resolve_model
from realizar.bench.mix.invariance import (
    Crowd,
    Difference,
    SubjectWork,
    draw_subject,
    find_difference,
    run_alone,
    run_beside,
)
from realizar.bench.mix.kinds import KINDS, find_kind
from realizar.bench.serve_workload import Lengths
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import find_checkpoint, load_core
from realizar.models.generated.shapes import SHAPES


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or pulled name; without it, a model of --shape")
    parser.add_argument("--shape", default="llama-1b", choices=sorted(SHAPES))
    parser.add_argument("--type", default="q4_k_m", choices=("q4_k_m", "q8_0", "bf16", "f16"))
    parser.add_argument("--keep", type=Path, help="folder that keeps the model of a shape for the next run")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "f16", "bf16", "int8"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-batch-invariant", action="store_true", help="to see what differs without it")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    parser.add_argument("--prompt-tokens", default="1-2000")
    parser.add_argument("--output-tokens", default="1-100")
    parser.add_argument("--open", type=int, default=64, help="requests open at once beside each other")
    parser.add_argument("--leave", type=float, default=0.3, help="share of requests that are only beside, and aborted")
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument("--kv-cache-bytes", type=int)
    cache.add_argument("--preempt", type=int, help="a KV cache of so many of the longest requests")
    parser.add_argument("--max-step-tokens", type=int)
    parser.add_argument("--speculative-tokens", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=20, help="differences to print")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_core(arguments: argparse.Namespace, longest: int, folder: Path) -> EngineCore:
    """An engine for requests of `longest` tokens."""
    config = EngineConfig(
        device=arguments.device, batch_invariant=not arguments.no_batch_invariant, context_length=longest,
        kv_cache_dtype=arguments.kv_cache_dtype, kv_cache_bytes=arguments.kv_cache_bytes,
        max_step_tokens=arguments.max_step_tokens, speculative_tokens=arguments.speculative_tokens,
    )  # fmt: skip
    model = arguments.model
    if model is None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{arguments.shape}-{arguments.type}.gguf"
        if not path.is_file():
            partial = path.with_suffix(".partial")
            write_model(arguments.shape, partial, folder, arguments.type)
            partial.replace(path)
        model = str(path)
    checkpoint = find_checkpoint(model)
    if arguments.preempt is not None:
        spec, resolved = resolve_model(checkpoint, config)
        plan = plan_memory(spec, checkpoint, resolved)
        config = replace(config, kv_cache_bytes=math.ceil(arguments.preempt * longest * plan.kv_bytes_per_token))
    return load_core(checkpoint, config)


def check(core: EngineCore, arguments: argparse.Namespace, kinds: list[str]) -> tuple[list[Difference], int]:
    """Run all requests twice; their first differences, and how many sequences were preempted beside others."""

    def log(text: str) -> None:
        print(f"{time.perf_counter() - started_s:6.0f} s  {text}", file=sys.stderr, flush=True)

    started_s = time.perf_counter()
    work = SubjectWork(
        core.spec.vocab_size, Lengths.parse(arguments.prompt_tokens, "prompt-tokens"),
        Lengths.parse(arguments.output_tokens, "output-tokens"), kinds, arguments.seed,
    )  # fmt: skip
    subjects = [draw_subject(work, number) for number in range(arguments.requests)]
    alone = run_alone(core, subjects, log)
    before = core.counts
    beside = run_beside(core, subjects, work, Crowd(arguments.open, arguments.leave, arguments.seed), log)
    after = core.counts
    print(
        f"{arguments.requests} requests in {time.perf_counter() - started_s:.0f} s; beside others"
        f" {after.prefix_cache_hits - before.prefix_cache_hits} prompt tokens were cached,"
        f" {after.preemptions - before.preemptions} sequences preempted"
    )
    found = [find_difference(subject, alone[subject.name], beside[subject.name]) for subject in subjects]
    for kind in kinds:
        of_kind = [difference for subject, difference in zip(subjects, found, strict=True) if subject.kind == kind]
        same = sum(difference is None for difference in of_kind)
        print(f"{kind:>20} {same} of {len(of_kind)} the same")
    core.audit()
    differences = [difference for difference in found if difference is not None]
    return differences, after.preemptions - before.preemptions


def record(differences: list[Difference], arguments: argparse.Namespace) -> dict[str, object]:
    """Everything, for JSON."""
    return {
        "options": {name: str(value) for name, value in vars(arguments).items()},
        "requests": arguments.requests,
        "differences": [
            {"request": each.subject.name, "choice": each.choice, "position": each.position, "what": each.what,
             "text": str(each)}
            for each in differences
        ],
    }  # fmt: skip


def main() -> int:
    arguments = parse_arguments()
    kinds = [find_kind(name, "kinds").name for name in arguments.kinds.split(",")]
    longest = sum(Lengths.parse(getattr(arguments, name), name).high for name in ("prompt_tokens", "output_tokens"))
    with ExitStack() as ends:
        folder = arguments.keep or Path(ends.enter_context(tempfile.TemporaryDirectory()))
        core = make_core(arguments, longest + 1, folder)
        ends.callback(core.close)
        differences, num_preempted = check(core, arguments, kinds)
    for difference in differences[: arguments.show]:
        print(difference)
    counts = Counter(difference.what for difference in differences)
    print(f"{arguments.requests - len(differences)} of {arguments.requests} the same; differences: {dict(counts)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record(differences, arguments), indent=1), encoding="utf-8")
    if arguments.preempt is not None and not num_preempted:
        print("nothing was preempted: more requests must be open, or the KV cache smaller")
        return 1
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
