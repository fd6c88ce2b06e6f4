"""How fast four honest keys are served beside a hostile one, over what they get beside one more honest key.

    python scripts/time_shares.py --model smollm2:135m --device cpu --streams 4
    python scripts/time_shares.py --shape llama-8b --seconds 8 --rounds 3

A server of several keys is loaded by a process for each key. Honest keys keep some streams of short chats open; the
fifth is one more of them, or sends what should cost the others most: 128 choices a request, 60 streams of long answers,
prompts as long as the context allows, many stop strings. All fifth keys come in turns, several rounds; the table has
medians. Aimed for are 0.6 of the tokens/s, and first texts within three times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cuda_serve import served, write_model

from realizar.hub.pull import resolve

_WORDS = ("river", "stone", "letter", "garden", "winter", "candle", "harbour", "engine", "silver", "meadow")
_KEYS = ("a", "b", "c", "d", "fifth")
_SETTLE_S = 1.0  # of each load that is not counted


@dataclass(frozen=True)
class Client:
    """What one key sends: `streams` requests at a time, each of `words` and with these fields."""

    streams: int
    words: int
    fields: dict[str, Any]


def fifth_clients(streams: int, context: int) -> dict[str, Client]:
    """The fifth key's loads by name; the first one is honest."""
    stops = [f"{word} {number}" for number in range(8) for word in _WORDS[:2]]
    return {
        "one more honest": honest(streams),
        "n=128": Client(streams, 64, {"max_tokens": 64, "n": 128}),
        "60 streams": Client(60, 64, {"max_tokens": 512}),
        "long prompts": Client(streams, context * 2 // 3, {"max_tokens": 16}),
        "many stop strings": Client(streams, 64, {"max_tokens": 64, "stop": stops}),
    }


def honest(streams: int) -> Client:
    return Client(streams, 64, {"max_tokens": 64})


@dataclass
class Served:
    """Tokens that a key was sent after the load had settled, and seconds to the first text of each request."""

    tokens: int
    firsts: list[float]
    failed: int


async def _stream(http: httpx.AsyncClient, client: Client, ends: float, seed: int, found: Served) -> None:
    chosen, begins = random.Random(seed), time.monotonic() + _SETTLE_S
    while (sent := time.monotonic()) < ends:
        text = " ".join(chosen.choices(_WORDS, k=client.words))
        body = {"model": "m", "prompt": text, "stream": True, "temperature": 0, "ignore_eos": True, **client.fields}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        before = 0
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                found.failed += 1
                await asyncio.sleep(0.1)
                continue
            async for line in answer.aiter_lines():
                now = time.monotonic()
                if now > ends:
                    return
                if line.startswith("data: {"):
                    written = json.loads(line[6:])["usage"]["completion_tokens"]
                    found.tokens += (written - before) * (now > begins)
                    if not before and written and now > begins:
                        found.firsts.append(now - sent)
                    before = written


def _load(port: int, key: str, client: Client, seconds: float, seed: int) -> Served:
    async def run() -> Served:
        found = Served(0, [], 0)
        ends = time.monotonic() + _SETTLE_S + seconds
        headers, limits = {"Authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=600) as http:
            await asyncio.gather(
                *(_stream(http, client, ends, seed * 1000 + number, found) for number in range(client.streams))
            )
        return found

    return asyncio.run(run())


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    """Lines of the table."""
    fifths = fifth_clients(arguments.streams, arguments.context)
    rates, firsts, failed = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list), 0
    with multiprocessing.get_context("spawn").Pool(len(_KEYS)) as pool:
        for number in range(arguments.rounds):
            for name, fifth in fifths.items():
                clients = [honest(arguments.streams)] * 4 + [fifth]
                found = pool.starmap(
                    _load,
                    [(arguments.port, key, client, arguments.seconds, number * 10 + place)
                     for place, (key, client) in enumerate(zip(_KEYS, clients, strict=True))],
                    chunksize=1,
                )  # fmt: skip
                others = found[:4]
                rates[name].append(sum(each.tokens for each in others) / arguments.seconds)
                firsts[name] += [first for each in others for first in each.firsts]
                failed += sum(each.failed for each in others)
    base = next(iter(fifths))
    yield "| fifth key | tokens/s of the four | of those beside an honest one | first text, ms: p50 / p99 | times p50 |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, values in rates.items():
        middle, (half, most) = statistics.median(values), _percentiles(firsts[name])
        share, times = middle / statistics.median(rates[base]), half / _percentiles(firsts[base])[0]
        yield f"| {name} | {middle:,.0f} | {share:.2f} | {half * 1e3:.0f} / {most * 1e3:.0f} | {times:.2f} |"
    yield f"refused requests of the four: {failed}"


def _percentiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]


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
