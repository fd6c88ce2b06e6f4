"""How fast four honest keys are served beside a hostile one, over what they get beside one more honest key.

    python scripts/time_shares.py --model smollm2:135m --device cpu --streams 4
    python scripts/time_shares.py --shape llama-8b --seconds 8 --rounds 3

A server of several keys is loaded by a process for each key. Honest keys keep some streams of short answers open; the
fifth is one more of them, or sends what should cost the others most: 128 choices a request, 60 streams of long answers,
prompts as long as the context allows, many stop strings. All fifth keys come in turns, several rounds; the table has
medians. Aimed for are 0.6 of the tokens/s, and first texts within three times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cuda_serve import served, write_model

from realizar.bench.serve.client import Server
from realizar.bench.serve.dialects import REALIZAR
from realizar.bench.serve.figures import Percentiles, output_rate
from realizar.bench.serve.load import Generators, LoadRun
from realizar.bench.serve.workload import Lengths, Workload
from realizar.hub.pull import resolve

_KEYS = ("a", "b", "c", "d", "fifth")
_TIMEOUT_S = 600.0


def fifth_loads(honest: Workload, context: int) -> dict[str, Workload]:
    """The fifth key's loads by name; the first one is honest."""
    words, tokens = context * 2 // 3, Lengths(16, 16)
    return {
        "one more honest": honest,
        "n=128": replace(honest, fields={"n": 128}),
        "60 streams": replace(honest, concurrency=60, output_tokens=Lengths(512, 512)),
        "long prompts": replace(honest, prompt_length=Lengths(words, words), output_tokens=tokens),
        "many stop strings": replace(honest, fields={"stop": [f"stop {number}" for number in range(16)]}),
    }


def _load(port: int, key: str, work: Workload) -> LoadRun:
    server = Server(key, f"http://127.0.0.1:{port}", "m", api_key=key, dialect=REALIZAR)
    with Generators(1) as generators:
        return generators.run(server, work, _TIMEOUT_S)


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    """Lines of the table."""
    short = Lengths(64, 64)
    honest = Workload(
        {"greedy": 1.0}, seconds=arguments.seconds, concurrency=arguments.streams, prompt_length=short,
        output_tokens=short,
    )  # fmt: skip
    loads = fifth_loads(honest, arguments.context)
    rates, firsts, failed = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list), 0
    with multiprocessing.get_context("spawn").Pool(len(_KEYS)) as pool:
        for number in range(arguments.rounds):
            for name, fifth in loads.items():
                works = [
                    (arguments.port, key, replace(work, seed=number, salt=key))
                    for key, work in zip(_KEYS, (*[honest] * 4, fifth), strict=True)
                ]
                others = pool.starmap(_load, works, chunksize=1)[:4]
                rates[name].append(sum(map(output_rate, others)))
                answers = [answer for run in others for answer in run.answers]
                firsts[name] += [answer.ttft_s for answer in answers if len(answer.deltas_s)]
                failed += sum(answer.error is not None for answer in answers)
    yield "| fifth key | tokens/s of the four | of those beside an honest one | first text, ms: p50 / p99 | times p50 |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    base_rate, base = statistics.median(rates[next(iter(loads))]), Percentiles.of_seconds(firsts[next(iter(loads))])
    for name, values in rates.items():
        rate, first = statistics.median(values), Percentiles.of_seconds(firsts[name])
        texts = f"{first.median:.0f} / {first.p99:.0f} | {first.median / base.median:.2f}" if first and base else "| "
        yield f"| {name} | {rate:,.0f} | {rate / base_rate:.2f} | {texts} |"
    yield f"failed requests of the four: {failed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or pulled name of a model to serve in place of a generated one")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=8, help="of each honest key")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a request at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api-processes", type=int, default=4)
    parser.add_argument("--port", type=int, default=8794)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{key}\n" for key in _KEYS), encoding="utf-8")
        path = resolve(arguments.model) if arguments.model else folder / "m.gguf"
        if not arguments.model:
            write_model(arguments.shape, path, folder)
        options = ["--device", arguments.device, "--context-length", str(arguments.context)]
        options += ["--api-key-file", str(keys), "--api-processes", str(arguments.api_processes)]
        options += ["--served-model-name", "m"]
        with served(path, arguments.port, options, folder / "cache"):
            print(json.dumps(vars(arguments)), *measure(arguments), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
