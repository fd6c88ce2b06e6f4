"""Real requests on a GPU: kinds in turn beside greedy ones, then many clients of mixed kinds, on a generated model.

    python scripts/cuda_mix.py --seconds 10 --mixed-seconds 60 --out /tmp/mix
    python scripts/cuda_mix.py --seconds 4 --kinds greedy,temperature,dry,json-schema --mixed-seconds 0
    python scripts/cuda_mix.py --kinds greedy,logprobs --api-processes 1,2,4
    python scripts/cuda_mix.py --shape llama-8b --in-flight 64,256 --words 128 --kinds greedy,temperature-top-p
    python scripts/cuda_mix.py --device cpu --model smollm2:135m --in-flight 16 --tokens 64 --mixed-seconds 0

A server of a model with random weights is loaded by processes of its own. First each kind alone, 64 requests in flight
(or each number of --in-flight) of 64 words and 256 tokens, the kinds in turn and several rounds; the table has the
medians, their ratios to greedy and what is aimed for. Before them comes a shorter load of each kind that does not
count: a new server records graphs, compiles schemas and makes names of tokens in it. Then 160 clients of all kinds, 1
to 6,000 words in and 1 to 400 tokens out; 45 % leave early. A short load reads more prompts than it has answers, so the
requests that end once it has settled are also counted whole: prompt and generated tokens are then of the same requests.
`simulate_mix.py` puts the same requests on a made-up device. With several numbers of API processes a server of each is
loaded in turn. The run takes about kinds x rounds x seconds and the mixed seconds, and a minute for the model and the
start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

from cuda_serve import served, write_model

from realizar.bench.serve.client import Server
from realizar.bench.serve.compare import MIX, ServerRuns, compare_servers
from realizar.bench.serve.figures import figures_of, output_rate
from realizar.bench.serve.kinds import find_kind, parse_weights
from realizar.bench.serve.load import Generators, LoadRun, default_generators
from realizar.bench.serve.report import BUSY, as_markdown, as_record
from realizar.bench.serve.servers import find_server
from realizar.bench.serve.workload import Lengths, Workload
from realizar.hub.pull import resolve
from realizar.models.generated.shapes import SHAPES

_KINDS = (
    "greedy,temperature,top-k-top-p-min-p,top-p,temperature-top-p,typical,mirostat,penalties,bias,logprobs,dry,regex,"
    "json-schema,mix"
)
# Shares of the greedy rate that are aimed for, on a GPU 0.9 for others, and 0.95 with the 8B shape; greedy itself on an
# H200, tokens/s by shape and requests in flight.
_SHARES = {"dry": 0.8, "regex": 0.75, "json-schema": 0.75, "tools": 0.75, MIX: 0.8}
_SHARE, _CPU_SHARE = 0.9, 0.85
_SHARE_OF_SHAPE = {"llama-8b": 0.95}
_GREEDY = {("llama-1b", 64): 45_000, ("llama-8b", 256): 17_300}
_CONTEXT = 10_240
_GAPS = 20.0
_SETTLING = 0.3  # of the mixed seconds, after which requests that end are counted whole


class ProcessorTimes:
    """Processor time of a server's processes during each load, from /proc.

    Args:
        pid: of the process that was started; its children count by what they do.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._label: str | None = None
        self._since_s, self._before = 0.0, dict[str, float]()
        self._taken: dict[str, defaultdict[str, float]] = {}

    def begin(self, label: str | None) -> None:
        """Another load begins, or with None the last one has ended."""
        now_s, used = time.perf_counter(), self.used_s()
        if self._label is not None:
            taken = self._taken.setdefault(self._label, defaultdict(float))
            taken["wall"] += now_s - self._since_s
            for name, seconds in used.items():
                taken[name] += max(0.0, seconds - self._before.get(name, 0.0))
        self._label, self._since_s, self._before = label, now_s, used

    def lines(self) -> list[str]:
        """Each process's share of a core, for each load."""
        lines = []
        for label, taken in self._taken.items():
            shares = (f"{name} {taken[name] / taken['wall']:.2f}" for name in sorted(taken) if name != "wall")
            lines.append(f"{label:>20} cores of the server's processes: {', '.join(shares)}")
        return lines

    def used_s(self) -> dict[str, float]:
        """Seconds until now by name; processes of one name together."""
        used: dict[str, float] = {}
        parents: dict[int, int] = {}
        seconds: dict[int, tuple[str, float]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            ticks = sum(map(int, fields[11:15]))  # its own, and those of its children that have ended
            seconds[pid] = _name_of(command), ticks / os.sysconf("SC_CLK_TCK")
        for pid, (name, taken_s) in seconds.items():
            above = pid
            while above not in (self._pid, 0):
                above = parents.get(above, 0)
            if above == self._pid:
                used[name] = used.get(name, 0.0) + taken_s
        return used


def _name_of(command: bytes) -> str:
    if b"fork_server" in command:
        return "grammars"
    if b"cli.api_process" in command:
        return "API processes"
    return "engine" if b"engine.process" in command else "API"


def kinds_in_turn(
    server: Server, in_flight: int, arguments: argparse.Namespace, generators: Generators, times: ProcessorTimes
) -> ServerRuns:
    work = Workload(
        seconds=arguments.seconds, concurrency=in_flight, seed=arguments.seed,
        prompt_length=Lengths(arguments.words, arguments.words),
        output_tokens=Lengths(arguments.tokens, arguments.tokens),
    )  # fmt: skip
    loads = {
        kind: replace(work, weights=parse_weights((), "kinds") if kind == MIX else {kind: 1.0})
        for kind in arguments.kinds.split(",")
    }
    return _run(server, loads, generators, arguments, times, f"kinds-{in_flight}")


def mixed_clients(
    server: Server, words: str, arguments: argparse.Namespace, generators: Generators, times: ProcessorTimes,
    number: int,
) -> ServerRuns:  # fmt: skip
    work = Workload(
        seconds=arguments.mixed_seconds, concurrency=arguments.clients, seed=arguments.seed + 1000 * (1 + number),
        prompt_length=Lengths.parse(words, "mixed-words"),
        output_tokens=Lengths.parse(arguments.mixed_tokens, "mixed-tokens"), leave_share=arguments.leave,
    )  # fmt: skip
    return _run(server, {MIX: work}, generators, arguments, times, f"mixed-{words}")


def _run(
    server: Server, loads: dict[str, Workload], generators: Generators, arguments: argparse.Namespace,
    times: ProcessorTimes, name: str,
) -> ServerRuns:  # fmt: skip
    work = next(iter(loads.values()))
    is_mixed = name.startswith("mixed")
    rounds = 1 if is_mixed else arguments.rounds

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        if text.startswith("round "):
            label = text.rpartition(", ")[2]
            times.begin("mixed clients" if is_mixed else f"{work.concurrency} x {label}")

    if arguments.first_seconds and not is_mixed:
        first = {kind: replace(load, seconds=arguments.first_seconds) for kind, load in loads.items()}
        compare_servers([server], first, generators, rounds=1, timeout_s=300, log=lambda text: log(f"first {text}"))
    (result,) = compare_servers([server], loads, generators, rounds=rounds, timeout_s=300, log=log)
    times.begin(None)
    print(as_markdown([result]), flush=True)
    if arguments.out is not None:
        record = as_record([result], {**asdict(work), "rounds": rounds, "options": vars(arguments)}, requests=False)
        (arguments.out / f"{name}-{arguments.api_processes}.json").write_text(
            json.dumps(record, default=str), encoding="utf-8"
        )
    return result


def settled_rates(run: LoadRun, settle_s: float) -> tuple[int, float, float]:
    """The requests that ended once a load has run for `settle_s`, and their prompt and output tokens per second.

    A load's first requests come all at once, and at its end prompts have been read whose answers are still to come: the
    shorter the load, the more of its tokens are of prompts. These are whole requests, so their tokens are in the mix's
    own ratio.
    """
    begin_s, end_s = run.start_s + settle_s, run.end_s
    ended = [
        each for each in run.answers if each.error is None and len(each.deltas_s) and begin_s <= each.ended_s <= end_s
    ]
    prompts = sum(each.prompt_tokens or each.request.prompt_length for each in ended)
    seconds = max(end_s - begin_s, 1e-9)
    return len(ended), prompts / seconds, sum(each.output_tokens for each in ended) / seconds


def aims(result: ServerRuns, in_flight: int, arguments: argparse.Namespace) -> list[str]:
    """Lines that say for each kind what it reached of what is aimed for."""
    on_gpu = arguments.device != "cpu"
    share_of_others = _SHARE_OF_SHAPE.get(arguments.shape, _SHARE)
    medians = {label: statistics.median(map(output_rate, runs)) for label, runs in result.runs.items()}
    greedy, lines = medians.get("greedy"), [f"{in_flight} in flight"]
    for label, rate in medians.items():
        if label == "greedy":
            aim = _GREEDY.get((arguments.shape, in_flight)) if on_gpu and arguments.model is None else None
            reached = "" if aim is None else f", {'reached' if rate >= aim else 'MISSED'}: {aim:,}"
            lines.append(f"{label:>20} {rate:9,.0f} tokens/s{reached}")
        elif greedy:
            share, aim_share = rate / greedy, _SHARES.get(label, share_of_others) if on_gpu else _CPU_SHARE
            word = "reached" if share >= aim_share else "MISSED"
            lines.append(f"{label:>20} {rate:9,.0f} tokens/s, {share:.2f} of greedy, {word}: {aim_share}")
    return lines


def mixed_lines(result: ServerRuns, words: str) -> list[str]:
    """Lines with the totals of the mixed clients, whose prompts have so many words."""
    runs = result.runs[MIX]
    every, run = figures_of(runs), runs[0]
    rates = f"{every.input_throughput:,.0f} prompt and {every.output_throughput:,.0f} generated tokens/s"
    counts = f"{every.requests} requests, {every.failed} failed, {every.left} left early"
    lines = [f"mixed clients, {words} words: {rates}; {counts}"]
    settle_s = _SETTLING * run.duration_s
    num_settled, prompts, generated = settled_rates(run, settle_s)
    if num_settled:
        ratio = prompts / max(generated, 1e-9)
        lines.append(
            f"of the {num_settled} requests that ended after {settle_s:.1f} s: {prompts:,.0f} prompt and "
            f"{generated:,.0f} generated tokens/s, {ratio:.1f} prompt tokens for each that is generated"
        )
    if (gaps := every.multiples) is not None:
        word = "reached" if gaps.p99_9 < _GAPS else "MISSED"
        lines.append(f"99.9 % of gaps under {gaps.p99_9:.1f} of their stream's median, {word}: {_GAPS:g}")
    if (state := result.state) is not None:
        lines.append(f"the server holds {'nothing' if state.is_empty else dict(state.gauges)} afterwards")
    return lines


def busy_lines(*results: ServerRuns) -> list[str]:
    """A line for each load whose generator was busy enough to be the bound."""
    return [
        f"THE GENERATOR WAS BUSY, {run.busy[0]:.0%} of a core, in {label}: its rate may be the generator's"
        for result in results
        for label, runs in result.runs.items()
        for run in runs
        if run.busy[0] > BUSY
    ]


def describe_machine() -> str:
    """The GPU and its driver, where there is one."""
    if (program := shutil.which("nvidia-smi")) is None:
        return "no nvidia-smi here"
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or pulled name of a model to serve in place of a generated one")
    parser.add_argument("--shape", default="llama-1b", choices=sorted(SHAPES))
    parser.add_argument("--type", default="q4_k_m", choices=("q4_k_m", "q8_0", "bf16", "f16"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind and round; 0 leaves the kinds out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-seconds", type=float, default=4.0, help="of each kind before the rounds, not counted")
    parser.add_argument("--kinds", default=_KINDS, help="with commas between; mix is all kinds by their weights")
    parser.add_argument("--in-flight", default="64", help="numbers of requests, each a load, with commas between")
    parser.add_argument("--words", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--mixed-seconds", type=float, default=60.0, help="of the mixed clients; 0 leaves them out")
    parser.add_argument("--clients", type=int, default=160)
    parser.add_argument("--mixed-words", default="1-6000", help="several, each a load, with commas between")
    parser.add_argument("--mixed-tokens", default="1-400")
    parser.add_argument("--leave", type=float, default=0.45)
    parser.add_argument("--generators", type=int, default=default_generators())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--api-processes", default="1", help="numbers of them, each a server, with commas between")
    parser.add_argument("--serve", default="", help="further options of realizar serve, in one text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8793)
    parser.add_argument("--keep", type=Path, help="folder that keeps the model and compiled kernels for the next run")
    parser.add_argument("--out", type=Path, help="folder for all figures as JSON")
    arguments = parser.parse_args()
    for kind in arguments.kinds.split(","):
        if kind != MIX:
            find_kind(kind, "kinds")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def measure(arguments: argparse.Namespace, times: ProcessorTimes) -> list[str]:
    """Load the server that runs at the port; the summary's lines."""
    url = f"http://127.0.0.1:{arguments.port}"
    server = find_server(Server(arguments.model or arguments.shape, url, ""))
    results: list[ServerRuns] = []
    lines: list[str] = []
    with Generators(arguments.generators) as generators:
        for in_flight in map(int, arguments.in_flight.split(",")) if arguments.seconds else ():
            results.append(kinds_in_turn(server, in_flight, arguments, generators, times))
            lines += aims(results[-1], in_flight, arguments)
        if arguments.mixed_seconds:
            for number, words in enumerate(arguments.mixed_words.split(",")):
                results.append(mixed_clients(server, words, arguments, generators, times, number))
                lines += mixed_lines(results[-1], words)
    return [*lines, *busy_lines(*results), *times.lines()]


def model_path(arguments: argparse.Namespace, folder: Path) -> Path:
    """The model to serve: the given one, else one of the shape, written if it is not there yet."""
    if arguments.model is not None:
        return resolve(arguments.model)
    path = folder / f"{arguments.shape}-{arguments.type}.gguf"
    if not path.is_file():
        partial = path.with_suffix(".partial")
        write_model(arguments.shape, partial, folder, arguments.type)
        partial.replace(path)
        print(f"{path.stat().st_size / 1e9:.2f} GB written", flush=True)
    return path


def main() -> int:
    arguments = parse_arguments()
    options = ["--device", arguments.device, *arguments.serve.split()]
    if arguments.model is None:
        context = min(_CONTEXT, SHAPES[arguments.shape].context_length)
        options = ["--context-length", str(context), *options]
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        path, lines = model_path(arguments, folder), list[str]()
        for processes in arguments.api_processes.split(","):
            arguments.api_processes = int(processes)
            with served(path, arguments.port, [*options, "--api-processes", processes], folder / "cache") as running:
                print(f"ready after {running.ready_s:.1f} s, API processes: {processes}", flush=True)
                lines += [f"API processes: {processes}", *measure(arguments, ProcessorTimes(running.pid))]
    print("\n".join(["", *lines]))
    if arguments.out is not None:
        (arguments.out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
