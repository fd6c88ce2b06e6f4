"""One measurement of one program in a process of its own: llama.cpp, ik_llama.cpp, realizar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from peers.tools import PeerTools
from realizar.bench.serve.process import library_environment
from realizar.errors import CapacityError

_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Workload:
    """Prefill of `prompt_tokens`, then decode of `gen_tokens` after them; `repeats` samples of each.

    `instruction_set` is forced on realizar, whose other code is then compiled for a processor that has no wider one;
    a peer is forced by building it so.
    """

    prompt_tokens: int = 512
    gen_tokens: int = 64
    repeats: int = 3
    instruction_set: str | None = None


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second, the median of a run's samples."""

    prefill: float
    decode: float


def run_llamacpp(tools: PeerTools, model: Path, threads: int, work: Workload) -> Speeds:
    """`llama-bench -p P -n 0`, then `llama-bench -p 0 -n G -d P`.

    Raises:
        CapacityError: it failed; its last words are in the message.
    """
    common = [str(tools.llama_bench), "-m", str(model), "-t", str(threads), "-r", str(work.repeats), "-o", "json"]
    prompt, generated = str(work.prompt_tokens), str(work.gen_tokens)
    environment = library_environment(tools.llama_bench)
    prefill = json.loads(_output([*common, "-p", prompt, "-n", "0"], environment))
    decode = json.loads(_output([*common, "-p", "0", "-n", generated, "-d", prompt], environment))
    return Speeds(median(prefill[0]["samples_ts"]), median(decode[0]["samples_ts"]))


def run_ik(python: Path, model: Path, threads: int, work: Workload, *, repack: bool) -> Speeds:
    """ik_llama.cpp, with flash attention where it bears it (it aborts on some processors).

    Raises:
        CapacityError: as `run_llamacpp`.
    """
    probe = Path(__file__).with_name("ik_probe.py")
    numbers = (threads, work.prompt_tokens, work.gen_tokens, work.repeats, int(repack))
    command = [str(python), str(probe), str(model), *map(str, numbers)]
    try:
        output = _output([*command, "1"])
    except CapacityError:
        output = _output([*command, "0"])
    speeds = json.loads(output.splitlines()[-1])
    return Speeds(median(speeds["prefill"]), median(speeds["decode"]))


def run_realizar(model: Path, threads: int, work: Workload) -> Speeds:
    """`realizar bench`.

    Raises:
        CapacityError: as `run_llamacpp`.
    """
    command = [sys.executable, "-m", "realizar", "bench", str(model), "--threads", str(threads), "--batch", "1"]
    command += ["--prompt-tokens", str(work.prompt_tokens), "--gen-tokens", str(work.gen_tokens)]
    command += ["--repeats", str(work.repeats), "--json"]
    environment = None
    if work.instruction_set is not None:
        command += ["--instruction-set", work.instruction_set]
        environment = compiling_for(work.instruction_set)
    result = json.loads(_output(command, environment))["results"][0]
    return Speeds(result["prefill_tokens_per_s"]["median"], result["decode_tokens_per_s"]["median"])


def compiling_for(instruction_set: str) -> dict[str, str]:
    """An environment in which Numba compiles for the simplest processor with an instruction set, instead of this one.

    Otherwise float32 loops beside the forced matmuls would use this processor's wider vectors.
    """
    from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS, index_of

    chosen = INSTRUCTION_SETS[index_of(instruction_set)]
    return {**os.environ, "NUMBA_CPU_NAME": chosen.processor, "NUMBA_CPU_FEATURES": chosen.target_features}


def _output(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise CapacityError(f"{command[0]} ended with {result.returncode}: {lines[-1] if lines else 'no message'}")
    return result.stdout
