"""Every figure of speed that this machine can give, of one checkout or of two by turns, beside its peers, in one table.

A row is a load and one or several figures of it, each in tokens per second. The program of a row is a script or command
of the checkout itself, so a change of the measuring code belongs to the tree that has it. With --before each row runs
in both trees by turns, and which one is first changes from round to round. llama.cpp's programs run in the same turns
where their folder is given, and on a CPU ik_llama.cpp where an interpreter that imports its wheel is; the model of a
shape is a generated file of the same types.

    python scripts/bench_all.py --list
    python scripts/bench_all.py --rows '^cpu (sm|g|l)' --llama-programs LLAMA_CPP/build-cpu/bin --ik-python PYTHON
    python scripts/bench_all.py --rows 'llama-8b|mix' --before ../before --rounds 5 --out figures.json

Prints the table as Markdown: medians, their ratios, and the spread of the ratios over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
from peers.runs import Workload, run_ik

from realizar.backends.machine import physical_cores
from realizar.errors import CapacityError
from realizar.hub.pull import resolve
from realizar.models.generated.generate import generated_model
from realizar.models.generated.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[1]
OURS, BEFORE, PEER, IK = "realizar", "before", "llama.cpp", "ik_llama.cpp"

Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A load: a Python program of a checkout, and how its figures are read.

    Args:
        name: what `--rows` chooses by.
        program: its path in a checkout and its arguments; {out} stands for the file or folder that it writes.
        read: the figures in what it wrote, by name.
        device: "cpu" or "cuda".
        gpus: how many it needs.
        peer: llama.cpp's commands of the same figures, for the folder of its programs; None for none.
        ik: ik_llama.cpp's figures, for an interpreter that imports it; None for none.
    """

    name: str
    program: tuple[str, ...]
    read: Callable[[Path], Figures]
    device: str = "cuda"
    gpus: int = 1
    peer: Callable[[Path], Iterator[tuple[str, list[str]]]] | None = None
    ik: Callable[[Path], Figures] | None = None


def _bench_figures(out: Path) -> Figures:
    return dict(json.loads(out.read_text(encoding="utf-8")))


def _mix_figures(out: Path) -> Figures:
    """The median rate of each kind, from the records in a folder."""
    figures: Figures = {}
    for path in sorted(out.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for label, load in record["servers"][0]["loads"].items():
            name = f"served {label}, {record['load']['concurrency']} in flight"
            rates = [each.get("output_throughput", each.get("output_tokens_per_s")) for each in load["rounds"]]
            figures[name] = statistics.median(rates)  # the second name is an earlier checkout's
    return figures


def _cpu_figures(out: Path) -> Figures:
    found = json.loads(out.read_text(encoding="utf-8"))["results"]
    figures = {f"decode {each['batch']}": each["decode_tokens_per_s"]["median"] for each in found}
    return {**figures, "prefill": found[0]["prefill_tokens_per_s"]["median"]}


def _gpu(
    shape: str, batches: str, prefill: int = 0, *, name: str = "", options: Sequence[str] = (), peer: bool = False
) -> Row:
    program = ("scripts/cuda_bench.py", "--shape", shape, "--batches", batches, "--prefill", str(prefill))
    rows = [int(batch) for batch in batches.split(",") if batch]

    def commands(programs: Path) -> Iterator[tuple[str, list[str]]]:
        return llama_cpp.gpu_commands(programs, generated_model(shape, lambda _: None), rows, prefill)

    row_program = (*program, *options, "--json", "{out}")
    return Row(f"cuda {shape}{name}", row_program, _bench_figures, peer=commands if peer else None)


def _mix(name: str, *options: str, device: str = "cuda", gpus: int = 1) -> Row:
    program = ("scripts/cuda_mix.py", "--device", device, "--mixed-seconds", "0", "--rounds", "3", *options)
    return Row(f"{device} served {name}", (*program, "--out", "{out}"), _mix_figures, device, gpus)


def _cpu(model: str) -> Row:
    """A row of a pulled model or of a shape, on all physical cores."""
    options = ["--generate"] if model in SHAPES else []
    program = ("-m", "realizar", "bench", model, *options, "--device", "cpu", "--batch", "1", "--json")
    return Row(
        f"cpu {model}", program, _cpu_figures, "cpu",
        peer=lambda programs: llama_cpp.cpu_commands(programs, _file_of(model), physical_cores()),
        ik=lambda python: _ik_figures(python, _file_of(model)),
    )  # fmt: skip


def _file_of(model: str) -> Path:
    return generated_model(model, lambda _: None) if model in SHAPES else resolve(model)


def _ik_figures(python: Path, model: Path) -> Figures:
    """The better of weights as they are and repacked."""
    both = [run_ik(python, model, physical_cores(), Workload(), repack=repack) for repack in (False, True)]
    return {"decode 1": max(one.decode for one in both), "prefill": max(one.prefill for one in both)}


ROWS = (
    _cpu("smollm2:135m"),
    _cpu("gemma3:270m"),
    _cpu("llama-1b"),
    _mix("smollm2:135m, 16 streams", "--model", "smollm2:135m", "--in-flight", "16", "--tokens", "64", "--seconds",
         "6", "--kinds", "greedy,top-p,regex,json-schema,mix", device="cpu"),
    _gpu("llama-8b", "1,2,4,8,12,16,24,32,48,64,96,128,192,256", 2048, peer=True),
    _gpu("llama-8b", "1", 8192, name=", prompt of 8,192"),
    _gpu("llama-8b", "1", 16384, name=", prompt of 16,384", options=("--context", "16384", "--step-tokens", "8192")),
    _gpu("llama-8b", "1", name=", int8 cache after 16,384", options=("--context", "16384", "--kv-cache-dtype", "int8")),
    _gpu("llama-8b", "1,8,64,256", name=", sampled too", options=("--sampled",)),
    _gpu("llama-8b", "1,8,64,256", 2048, name=", q8_0", options=("--type", "q8_0")),
    _gpu("llama-8b", "1,8,64,256", 2048, name=", bf16", options=("--type", "bf16")),
    _gpu("llama-1b", "1,8,64,256", 2048, peer=True),
    _gpu("qwen2.5-1.5b", "1,8,64,256", 2048, peer=True),
    _gpu("qwen3-0.6b", "1,8,64,256", 2048),
    _gpu("qwen3-30b-a3b", "1,8,16,64,256", 2048, peer=True),
    _gpu("qwen3-30b-a3b", "", 16384, name=", prompt of 16,384", options=("--step-tokens", "8192")),
    _gpu("gemma4-26b-a4b", "1,64", 2048, peer=True),
    _gpu("gpt-oss-20b", "1,8,16,64,256", 2048, peer=True),
    _gpu("qwen3.6-35b-a3b", "1,8,16,64,256", 2048, peer=True),
    _gpu("qwen3.6-35b-a3b", "", 8192, name=", prompt of 8,192"),
    _gpu("qwen3.6-27b", "1,8,16,64,256", 2048, peer=True),
    _mix("1B, 64 in flight", "--seconds", "6", "--kinds",
         "greedy,temperature,top-p,logprobs,dry,regex,json-schema,mix"),
    _mix("8B, 64 and 256 in flight", "--shape", "llama-8b", "--in-flight", "64,256", "--words", "128", "--seconds",
         "10", "--kinds", "greedy,temperature-top-p"),
    *(_mix(f"8B, {gpus} replicas, 256 in flight for each", "--shape", "llama-8b", "--in-flight", str(256 * gpus),
           "--words", "128", "--seconds", "10", "--kinds", "greedy", "--api-processes", str(gpus), "--serve",
           f"--replicas {gpus}", gpus=gpus) for gpus in (2, 4)),
)  # fmt: skip


@dataclass
class Measured:
    """Figures of a row: for each of our trees and the peer, those of each round."""

    row: Row
    rounds: dict[str, list[Figures]] = field(default_factory=lambda: defaultdict(list))

    def values(self, who: str, figure: str) -> list[float]:
        return [found[figure] for found in self.rounds[who] if figure in found]

    def lines(self, columns: Sequence[str]) -> list[str]:
        """A line of the table for each figure."""
        names = dict.fromkeys(name for rounds in self.rounds.values() for found in rounds for name in found)
        lines = []
        for name in names:
            cells = [_number(self.values(who, name)) for who in columns]
            ratios = [_ratio(self.values(OURS, name), self.values(who, name)) for who in columns if who != OURS]
            lines.append(f"| {' | '.join((self.row.name, name, *cells, *ratios))} |")
        return lines


def _number(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f}" if values else ""


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the rounds' ratios, and the least and the greatest of several."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=False)]
    if not ratios:
        return ""
    spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.3f}{spread}"


def run_ours(row: Row, tree: Path) -> Figures:
    """The figures of one run of a row in a checkout.

    Raises:
        RuntimeError: the program failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        is_folder = "--out" in row.program
        out = Path(folder) if is_folder else Path(folder) / "figures.json"
        command = [sys.executable, *(part.format(out=out) for part in row.program)]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{row.name} in {tree}: {done.stderr.strip()[-2000:]}")
        if "{out}" not in row.program:
            out.write_text(done.stdout, encoding="utf-8")
        return row.read(out)


def _rates(commands: Sequence[tuple[str, list[str]]]) -> Figures:
    return {name: llama_cpp.rate(command) for name, command in commands}


def number_of_gpus() -> int:
    """GPUs that torch sees here; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count())


def machine() -> str:
    """The processor and the GPU of this machine, for the table's heading."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    names = [found[1] if found else platform.processor(), f"{os.cpu_count()} cores"]
    if number_of_gpus():
        import torch

        names.append(torch.cuda.get_device_name(0))
    return ", ".join(names)


def measure(rows: Sequence[Row], arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Measured]:
    """All rows; a row that fails is said and left out, and the others go on."""
    trees = {BEFORE: arguments.before, OURS: ROOT} if arguments.before else {OURS: ROOT}
    every = []
    for row in rows:
        measured = Measured(row)
        started = time.monotonic()
        try:
            for number in range(arguments.rounds):
                turns: list[tuple[str, Callable[[], Figures]]] = [
                    (name, partial(run_ours, row, tree)) for name, tree in trees.items()
                ]
                if row.peer is not None and arguments.llama_programs is not None:
                    commands = list(row.peer(arguments.llama_programs.resolve()))
                    turns.append((PEER, partial(_rates, commands)))
                if row.ik is not None and arguments.ik_python is not None:
                    turns.append((IK, partial(row.ik, arguments.ik_python.absolute())))
                for name, turn in turns if number % 2 == 0 else reversed(turns):
                    measured.rounds[name].append(turn())
        except (RuntimeError, OSError, ValueError, CapacityError) as error:
            say(f"{row.name} failed: {error}")
        every.append(measured)
        say(f"{row.name}: {time.monotonic() - started:.0f} s")
        if arguments.out is not None:
            _write(arguments.out, every)
    return every


def _write(path: Path, every: Sequence[Measured]) -> None:
    record: Mapping[str, Any] = {
        "machine": machine(),
        "rows": {measured.row.name: dict(measured.rounds) for measured in every},
    }
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def table(every: Sequence[Measured]) -> str:
    """All figures as Markdown."""
    columns = [who for who in (PEER, IK, BEFORE, OURS) if any(measured.rounds.get(who) for measured in every)]
    heads = ("load", "tokens per second", *columns, *(f"{OURS} / {who}" for who in columns if who != OURS))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for measured in every:
        lines += measured.lines(columns)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="a regular expression; rows in whose names it is found")
    parser.add_argument("--list", action="store_true", help="print the rows that this machine can run, and end")
    parser.add_argument("--before", type=Path, help="another checkout, measured by turns with this one")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--llama-programs", type=Path, help="folder of llama.cpp's llama-bench and llama-batched-bench")
    parser.add_argument("--ik-python", type=Path, help="an interpreter that imports ik_llama.cpp's wheel")
    parser.add_argument("--out", type=Path, help="file for all figures of all rounds as JSON, written after each row")
    arguments = parser.parse_args()
    gpus = number_of_gpus()
    rows = [row for row in ROWS if re.search(arguments.rows, row.name) and (row.device == "cpu" or gpus >= row.gpus)]
    if arguments.list:
        print("\n".join(row.name for row in rows))
        return 0
    if not rows:
        parser.error("no row of that name can run here; --list has those that can")
    every = measure(rows, arguments, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}\n\n{table(every)}")
    return 0 if all(measured.rounds.get(OURS) for measured in every) else 1


if __name__ == "__main__":
    sys.exit(main())
