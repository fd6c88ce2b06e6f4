"""`python -m fidelity.mixtures`: how far mixtures are from exact arithmetic, with their own choices of experts given.

Mean KL in nats to the specification's twin that goes the engine's way, on small models of random weights, as in
`make parity`, over 600 tokens. Choices of experts that flip are counted, and those with a margin below the error of the
scores. With `--source` llama.cpp reads the same files, and the twin goes its way too.

    PYTHONPATH=tests python -m fidelity.mixtures --device cpu --source LLAMA_CPP
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from architecture_case import Case
from architectures import CASES, BuiltCase
from backend_runs import BackendRunner
from fidelity.engine_routes import watch
from fidelity.given_routes import Distance, Routes, distance
from parity_table.checkpoints import build, forms_of
from parity_table.llama_cpp import compile_program, read_logits
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec
from reference_tensors import load_tensors


def _without(case: Case, option: str) -> Case:
    return replace(case, options={key: value for key, value in case.options.items() if key != option})


TOKENS = 600
VARIANTS = {
    "gpt-oss without YaRN": _without(CASES["gpt-oss"], "rope_parameters"),
    "mixtral without a window": _without(CASES["mixtral"], "sliding_window"),
}
"""Rows of which llama.cpp reads the file and computes the same function; see `parity_table.page.DIFFERENCES`."""
NAMES = (
    "qwen3moe", "olmoe", *VARIANTS, "qwen2moe", "glm4moe", "ernie4_5-moe", "granitemoe", "granitemoe-shared",
    "minimax-m2", "qwen3vlmoe",
)  # fmt: skip
CASES.update(VARIANTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="these alone, in place of all mixtures")
    parser.add_argument("--chunks", default="600", help="sizes of chunks that the prompt is read in, each in turn")
    parser.add_argument("--source", type=Path, help="llama.cpp's sources, built in `build`")
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    chunks = [int(each) for each in options.chunks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(options.source, Path(folder)) if options.source else None
        for name in options.case or NAMES:
            for weights in forms_of(name):
                if weights.startswith("F32"):
                    continue
                built = build(name, weights, Path(folder), TOKENS)
                checkpoint = open_checkpoint(built.path)
                spec = build_spec(checkpoint)
                tensors = load_tensors(spec, checkpoint)
                runner = _load(built, options.device, options.batch_invariant)
                for chunk in chunks:
                    with watch(runner) as notes:
                        logits = runner.logits(built.token_ids, (chunk,) * (TOKENS // chunk))
                    ours = distance(spec, tensors, built.token_ids, logits, notes.read())
                    _show(f"{name} | {weights} | {options.device}, {chunk}", ours)
                runner.close()
                if program is not None:
                    theirs = _of_llama_cpp(program, built, spec, tensors, Path(folder))
                    _show(f"{name} | {weights} | llama.cpp", theirs)
                built.path.unlink()
    return 0


def _load(built: BuiltCase, device: str, batch_invariant: bool) -> BackendRunner[Any]:
    config = EngineConfig(
        threads=2, block_size=32, max_step_tokens=640, max_running=1, kv_cache_bytes=64 << 20, graphs=False,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    module, name = ("cpu_runs", "load_runner") if device == "cpu" else ("backends.cuda.cuda_runs", "load_gpu_runner")
    runner: BackendRunner[Any] = getattr(importlib.import_module(module), name)(built.path, config)
    return runner


def _of_llama_cpp(
    program: Path, built: BuiltCase, spec: ModelSpec, tensors: Mapping[str, Any], folder: Path
) -> Distance | None:
    """llama.cpp's distance on the same file; None where it does not read it."""
    choices = folder / "choices"
    logits = read_logits(program, built, 1024, choices)
    if logits is None:
        return None
    numbers, parts, at = np.fromfile(choices, np.int32).astype(np.int64), [], 0
    for _, part in spec.mixtures():
        size = len(built.token_ids) * part.experts_per_token
        parts.append(numbers[at : at + size].reshape(-1, part.experts_per_token))
        at += size
    return distance(spec, tensors, built.token_ids, logits, Routes(parts))


def _show(title: str, found: Distance | None) -> None:
    if found is None:
        sys.stdout.write(f"| {title} | not read |\n")
        return
    near = " | " if found.near is None else f"{found.near} | {found.flipped_apart}"
    sys.stdout.write(f"| {title} | {found.kl:.2e} | {found.choices} | {found.flipped} | {near} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
