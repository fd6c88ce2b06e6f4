"""Decode and prefill of a generated model on a GPU, in turn with llama.cpp, which is built here from its sources.

Our figures are those of `cuda_bench.py`; its own are those of its programs on a file of the same shape and types:
`llama-batched-bench` with random tokens after prompts of as many tokens, and `llama-bench` for the prompt. Prints the
ratios of the medians. The build needs cmake, a C++ compiler and CUDA's; it takes minutes, lies in `build-cuda` of the
sources, and is gone on with where it stopped. Programs that were built elsewhere are named by `--programs`.

    python scripts/peers/cuda_llama_cpp.py --source LLAMA_CPP --build-only
    python scripts/peers/cuda_llama_cpp.py --source LLAMA_CPP --shape gemma4-26b-a4b --batches 1,64 --prefill 2048
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from realizar.bench.generate import generated_model
from realizar.bench.peer_tools import library_environment
from realizar.bench.shapes import SHAPES

PROGRAMS = ("llama-batched-bench", "llama-bench")
GENERATED = 128  # tokens a row, as in `cuda_bench.py`
_TRIES = 5
_WITHOUT = ("TESTS", "EXAMPLES", "SERVER", "APP", "UI")


def build(source: Path, capability: str, jobs: int) -> Path:
    """Build llama.cpp's programs for cards of a compute capability (90); returns their folder."""
    folder = source / "build-cuda"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={capability}"]
    options += [f"-DLLAMA_BUILD_{part}=OFF" for part in _WITHOUT] + [
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
    ]
    subprocess.run(["cmake", "-S", source, "-B", folder, *options], check=True)
    subprocess.run(["cmake", "--build", folder, "--parallel", str(jobs), "--target", *PROGRAMS], check=True)
    return folder / "bin"


def peer_commands(programs: Path, model: Path, batches: Sequence[int], prefill: int) -> Iterator[tuple[str, list[str]]]:
    """What of `cuda_bench.py` a command measures, and the command, which prints a line of JSON."""
    for batch in batches:
        prompt = 1 if batch == 1 else GENERATED
        context = batch * (prompt + GENERATED)
        yield f"decode {batch}", [
            str(programs / "llama-batched-bench"), "-m", str(model), "-ngl", "99", "-fa", "on", "-c", str(context),
            "-npp", str(prompt), "-ntg", str(GENERATED), "-npl", str(batch), "--output-format", "jsonl",
        ]  # fmt: skip
    if prefill:
        yield "prefill", [
            str(programs / "llama-bench"), "-m", str(model), "-ngl", "99", "-fa", "on", "-p", str(prefill), "-n", "0",
            "-b", str(prefill), "-ub", str(prefill), "-o", "jsonl",
        ]  # fmt: skip


def rate_of(printed: str) -> float | None:
    """Tokens per second in the last line of JSON that a program printed; None where it printed none."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    figures = json.loads(lines[-1]) if lines else {}
    rate = figures.get("speed_tg", figures.get("avg_ts"))
    return None if rate is None else float(rate)


def peer_rate(programs: Path, command: Sequence[str]) -> float:
    """Tokens per second that a command prints, which is run again where its last lines of output were lost.

    Lines that llama.cpp's thread for logs has not written when a program ends are lost now and then.
    """
    environment = library_environment(programs / PROGRAMS[0])
    for _ in range(_TRIES):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        rate = None if run.returncode else rate_of(run.stdout)
        if rate is not None:
            return rate
        if run.returncode:
            break
    raise SystemExit(f"{' '.join(command)}: {(run.stderr + run.stdout)[-2000:]}")


def peer_rates(programs: Path, model: Path, batches: Sequence[int], prefill: int) -> dict[str, float]:
    """llama.cpp's tokens per second, by the names of `cuda_bench.py`."""
    found = {}
    for work, command in peer_commands(programs, model, batches, prefill):
        found[work] = peer_rate(programs, command)
        print(f"llama.cpp {work}: {found[work]:.1f}", flush=True)
    return found


def own_rates(shape: str, batches: Sequence[int], prefill: int) -> dict[str, float]:
    """Our tokens per second, of a process that ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.json"
        script = Path(__file__).parents[1] / "cuda_bench.py"
        command = [sys.executable, str(script), "--shape", shape, "--batches", ",".join(map(str, batches))]
        subprocess.run([*command, "--prefill", str(prefill), "--json", str(path)], check=True)
        rates: dict[str, float] = json.loads(path.read_text())
    return rates


def show(rounds: Sequence[tuple[dict[str, float], dict[str, float]]]) -> None:
    """A line for each work: the medians of all rounds, and ours over llama.cpp's."""
    print(f"{'work':>12} {'realizar':>10} {'llama.cpp':>10} {'ratio':>6}")
    for work in rounds[0][0]:
        ours, theirs = (statistics.median(each[place][work] for each in rounds) for place in (0, 1))
        print(f"{work:>12} {ours:10.0f} {theirs:10.0f} {ours / theirs:6.2f}")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--source", type=Path, help="llama.cpp's sources")
    peer.add_argument("--programs", type=Path, help="folder of llama.cpp's programs, built before")
    parser.add_argument("--capability", default="90", help="of the card: 90 is an H200's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers beside each other")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--shape", default="gemma4-26b-a4b", choices=sorted(SHAPES))
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt; 0 for none")
    parser.add_argument("--rounds", type=int, default=2, help="of both programs, in turn")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    built = arguments.programs
    programs = built.resolve() if built else build(arguments.source.resolve(), arguments.capability, arguments.jobs)
    if arguments.build_only:
        return 0
    batches = [int(text) for text in arguments.batches.split(",") if text]
    model = generated_model(arguments.shape, lambda text: print(text, flush=True))
    rounds = []
    for _ in range(arguments.rounds):
        ours = own_rates(arguments.shape, batches, arguments.prefill)
        rounds.append((ours, peer_rates(programs, model, batches, arguments.prefill)))
    show(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
