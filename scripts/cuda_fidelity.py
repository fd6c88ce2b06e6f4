"""The distance of a model on the GPU from exact arithmetic: KL in nats of SmolLM2's or Gemma's recorded continuations.

Scored in chunks of several sizes, so that every route of the matmuls passes, with each element type of the KV cache.

    python scripts/cuda_fidelity.py smollm2 PATH --chunks 1,8,32,512
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from pathlib import Path

import numpy as np

_TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(_TESTS))

from backends.cuda.cuda_runs import GPURunner, load_gpu_runner  # noqa: E402
from fidelity.fidelity_rows import KEYS, TOP, Row, divergence, mean  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402


def score(runner: GPURunner, ids: list[int], start: int, chunk: int) -> list[Row]:
    """The most probable ids after each token from `start` on."""
    request = runner.request(0, ids)
    while request.computed < len(ids):
        runner.step([(request, min(chunk, len(ids) - request.computed))])
    rows: list[Row] = []
    for values in request.values()[start:-1].astype(np.float64):
        logprobs = values - values.max() - np.log(np.exp(values - values.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[:TOP]
        rows.append([[int(token), float(logprobs[token])] for token in best])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(KEYS))
    parser.add_argument("path", type=Path)
    parser.add_argument("--chunks", default="1,8,32,512")
    parser.add_argument("--kv", default="bf16,int8")
    arguments = parser.parse_args()
    recorded = json.loads(lzma.decompress((_TESTS / "data" / "fidelity_logprobs.json.xz").read_bytes()))
    prompts = recorded[KEYS[arguments.name]]["prompts"]
    exact = [row for prompt in prompts for row in prompt["exact_top_logprobs"]]
    peer = [row for prompt in prompts for row in prompt["llamacpp_top_logprobs"]]
    theirs = mean([divergence(*pair) for pair in zip(exact, peer, strict=True)])
    for kv in arguments.kv.split(","):
        config = EngineConfig(kv_cache_dtype=kv, max_running=1, kv_cache_bytes=256 << 20, context_length=512)
        runner = load_gpu_runner(arguments.path, config, 512)
        for chunk in map(int, arguments.chunks.split(",")):
            rows: list[Row] = []
            for prompt in prompts:
                start = len(prompt["prompt_tokens"]) - 1
                rows.extend(score(runner, prompt["prompt_tokens"] + prompt["tokens"], start, chunk))
            ours = mean([divergence(*pair) for pair in zip(exact, rows, strict=True)])
            top = mean([float(a[0][0] == b[0][0]) for a, b in zip(exact, rows, strict=True)])
            print(
                f"{arguments.name} KV {kv}, chunks of {chunk}: KL {ours:.5f}, llama.cpp {theirs:.5f}, ratio"
                f" {ours / theirs:.3f}, top-1 {top:.4f}",
                flush=True,
            )
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
