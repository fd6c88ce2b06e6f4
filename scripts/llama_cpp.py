"""llama.cpp's programs: built here from its sources, and what they measure of a row of `bench_all.py`.

The build needs cmake, a C++ compiler and, for a GPU, CUDA's. It takes minutes, lies in `build-cuda` or `build-cpu` of
the sources, and is gone on with where it stopped.

    python scripts/llama_cpp.py LLAMA_CPP                     # for this processor
    python scripts/llama_cpp.py LLAMA_CPP --capability 90     # for cards of a compute capability: 90 is an H200's
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from realizar.bench.serve.process import library_environment

PROGRAMS = ("llama-batched-bench", "llama-bench")
GENERATED = 128  # tokens a row, as in `cuda_bench.py`
_TRIES = 5
_WITHOUT = ("TESTS", "EXAMPLES", "SERVER", "APP", "UI")


def build(source: Path, capability: str, jobs: int) -> Path:
    """Build llama.cpp's programs, for the cards of a compute capability unless it is empty; returns their folder."""
    folder = source / ("build-cuda" if capability else "build-cpu")
    options = ["-DCMAKE_BUILD_TYPE=Release", *(f"-DLLAMA_BUILD_{part}=OFF" for part in _WITHOUT)]
    options += ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]
    options += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={capability}"] if capability else []
    subprocess.run(["cmake", "-S", source, "-B", folder, *options], check=True)
    subprocess.run(["cmake", "--build", folder, "--parallel", str(jobs), "--target", *PROGRAMS], check=True)
    return folder / "bin"


def gpu_commands(programs: Path, model: Path, batches: Sequence[int], prefill: int) -> Iterator[tuple[str, list[str]]]:
    """What of `cuda_bench.py` a command measures, and the command, which prints a line of JSON."""
    for batch in batches:
        prompt = 1 if batch == 1 else GENERATED
        context = batch * (prompt + GENERATED)
        yield f"decode {batch}", [
            str(programs / "llama-batched-bench"), "-m", str(model), "-ngl", "99", "-fa", "on", "-c", str(context),
            "-npp", str(prompt), "-ntg", str(GENERATED), "-npl", str(batch), "--output-format", "jsonl",
        ]  # fmt: skip
    if prefill:
        yield f"prefill {prefill}", [
            str(programs / "llama-bench"), "-m", str(model), "-ngl", "99", "-fa", "on", "-p", str(prefill), "-n", "0",
            "-b", str(prefill), "-ub", str(prefill), "-o", "jsonl",
        ]  # fmt: skip


def cpu_commands(programs: Path, model: Path, threads: int) -> Iterator[tuple[str, list[str]]]:
    """The same of `realizar bench`: 64 tokens after a prompt of 512, and that prompt."""
    bench = [str(programs / "llama-bench"), "-m", str(model), "-t", str(threads), "-o", "jsonl"]
    yield "decode 1", [*bench, "-p", "0", "-n", "64", "-d", "512"]
    yield "prefill", [*bench, "-p", "512", "-n", "0"]


def rate_of(printed: str) -> float | None:
    """Tokens per second in the last line of JSON that a program printed; None where it printed none."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    figures = json.loads(lines[-1]) if lines else {}
    rate = figures.get("speed_tg", figures.get("avg_ts"))
    return None if rate is None else float(rate)


def rate(command: Sequence[str]) -> float:
    """Tokens per second that a command prints, which is run again where its last lines of output were lost.

    Lines that llama.cpp's thread for logs has not written when a program ends are lost now and then.

    Raises:
        RuntimeError: the program fails, or prints no rate.
    """
    environment = library_environment(Path(command[0]))
    for _ in range(_TRIES):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = None if run.returncode else rate_of(run.stdout)
        if found is not None:
            return found
        if run.returncode:
            break
    raise RuntimeError(f"{' '.join(command)}: {(run.stderr + run.stdout)[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="llama.cpp's sources")
    parser.add_argument("--capability", default="", help="compute capability of the card; by default none is built for")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers beside each other")
    arguments = parser.parse_args()
    print(build(arguments.source.resolve(), arguments.capability, arguments.jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
