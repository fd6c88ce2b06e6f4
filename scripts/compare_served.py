"""Two checkouts' servers on the CPU, loaded by turns: processor time of a token, of each process, and the rate.

    python scripts/compare_served.py BEFORE AFTER [--threads 1] [--rounds 12] [--kinds greedy,top-p,mix]
    python scripts/compare_served.py BEFORE AFTER --threads 2 --requests 96

BEFORE and AFTER are folders with src/. Both servers stay up, and one generator, that of the checkout whose script this
is, sends each of them the same requests by turns, so that a machine's slow moments meet both. With one thread the
processor time of a token says what a checkout costs even where other programs run; threads that wait for one another
take some too, so that with several the rate is what counts, on an idle machine. A figure above 1 says that AFTER is the
better: the mean of the rounds' ratios without the outer fifths, its standard error, and the median of all.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from cuda_mix import ProcessorTimes
from cuda_serve import served

from realizar.bench.serve.client import Server
from realizar.bench.serve.compare import MIX
from realizar.bench.serve.kinds import find_kind, parse_weights
from realizar.bench.serve.load import Generators
from realizar.bench.serve.servers import find_server, wait_until_empty
from realizar.bench.serve.workload import Lengths, Workload
from realizar.hub.pull import resolve

_TRIAL_SEED = 1000  # requests that no measured load has in a cache
_TIMEOUT_S = 300.0
_WALL, _ALL, _GENERATOR = "wall", "all processes", "generator"


def load_of(kind: str, arguments: argparse.Namespace, seed: int) -> Workload:
    tokens, words = arguments.tokens, arguments.words
    return Workload(
        weights=parse_weights((), "kinds") if kind == MIX else {kind: 1.0}, num_requests=arguments.requests,
        concurrency=arguments.in_flight, prompt_length=Lengths(words, words), output_tokens=Lengths(tokens, tokens),
        seed=seed, salt=kind,
    )  # fmt: skip


def measure(server: Server, times: ProcessorTimes, work: Workload, generators: Generators) -> dict[str, float]:
    """Microseconds of a token that one load took: by the clock, and of processors by process."""
    before, own_s = times.used_s(), time.process_time()
    run = generators.run(server, work, _TIMEOUT_S)
    own_s = time.process_time() - own_s
    wait_until_empty(server)
    after = times.used_s()
    if errors := {each.error for each in run.answers} - {None}:
        raise SystemExit(f"{server.name}: {errors}")
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    spent |= {_ALL: sum(spent.values()) + own_s, _GENERATOR: own_s, _WALL: run.duration_s}
    tokens = sum(each.output_tokens for each in run.answers)
    return {name: 1e6 * seconds / tokens for name, seconds in spent.items()}


def lines_of(kind: str, before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> list[str]:
    """A line of the table for each process, for all together, and for the clock."""
    names = sorted({name for found in (*before, *after) for name, taken in found.items() if taken > 0.0})
    lines = []
    for name in names:
        pairs = [(one.get(name, 0.0), other.get(name, 0.0)) for one, other in zip(before, after, strict=True)]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        ratios = sorted(one / other for one, other in pairs if other > 0.0)
        middle = ratios[len(ratios) // 5 : len(ratios) - len(ratios) // 5]
        ratio = ""
        if len(middle) > 1:
            error = statistics.stdev(middle) / math.sqrt(len(middle))
            ratio = f"{statistics.mean(middle):.3f} +- {error:.3f}, median {statistics.median(ratios):.3f}"
        lines.append(f"| {kind} | {name} | {medians[0]:,.0f} | {medians[1]:,.0f} | {ratio} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", default="smollm2:135m", help="path or pulled name")
    parser.add_argument("--kinds", default="greedy,top-p,regex,json-schema,mix", help="with commas between")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=32, help="of a load")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--words", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=8795, help="of the first server; the second has the next one")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    for kind in kinds:
        if kind != MIX:
            find_kind(kind, "kinds")
    path, options = resolve(arguments.model), ["--device", "cpu", "--threads", str(arguments.threads)]
    found: defaultdict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        sides = []
        for place, folder in enumerate((arguments.before, arguments.after)):
            cache, port = Path(stack.enter_context(tempfile.TemporaryDirectory())), arguments.port + place
            running = stack.enter_context(served(path, port, options, cache, folder.resolve()))
            server = find_server(Server(str(folder), f"http://127.0.0.1:{port}", ""))
            sides.append((server, ProcessorTimes(running.pid)))
        generators = stack.enter_context(Generators(1))
        for kind in kinds:
            for server, times in sides:
                measure(server, times, load_of(kind, arguments, _TRIAL_SEED), generators)
        for number in range(arguments.rounds):
            for kind in kinds:
                for place in (0, 1) if number % 2 == 0 else (1, 0):  # neither is always the first
                    load = load_of(kind, arguments, number)
                    found[kind, place].append(measure(*sides[place], load, generators))
    print("| kind | process | before, us a token | after | before / after |\n|---|---|---|---|---|")
    for kind in kinds:
        print("\n".join(lines_of(kind, found[kind, 0], found[kind, 1])))


if __name__ == "__main__":
    main()
