"""Replicas of a model on one machine, beside one ideal cache and round robin; then one is killed, then all restart.

    python scripts/replicas/measure.py smollm2:135m [--replicas 4] [--streams 64] [--families 8] [--each 4]

Prompts are random ids: a prefix that a family shares, and a suffix of its own. Each stream sends one request after the
other. `--parts` takes some of these: `routed`; `first`, the time to the first token of requests that come alone, with
and without a cached prefix; `kill`, an engine killed under load; `restart`, SIGHUP under load; and `turns`, the load of
`routed` on a server of its own that takes replicas in turn. The exit status is 1 where a wish printed at the end does
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from realizar.replicas import link
from realizar.replicas.routing import PrefixRouter, ReplicaLoad, Route

PARTS = ("routed", "turns", "first", "kill", "restart")
_BLOCK_TOKENS = 32
_START_S = 300.0


class TurnRouter(PrefixRouter):
    """Takes replicas in turn, whatever they hold."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._next = itertools.count()

    def choose(self, keys: Sequence[bytes], num_tokens: int, loads: Mapping[str, ReplicaLoad]) -> Route | None:
        names = sorted(loads)
        return Route(names[next(self._next) % len(names)], 0) if names else None


@dataclass(frozen=True)
class Answer:
    """A request's end. Attributes: at_s: when it was sent, of `time.monotonic`. error: None if it came whole."""

    at_s: float
    first_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    has_begun: bool
    error: str | None


class Prompts:
    """Prompts of families. Args: vocabulary: ids are below it."""

    def __init__(self, arguments: argparse.Namespace, vocabulary: int = 40_000) -> None:
        self._arguments, self._vocabulary = arguments, vocabulary
        self._suffixes = random.Random(7)

    def of(self, part: str, family: int) -> list[int]:
        """A prompt of a family, another for each part."""
        prefix = random.Random(f"{part} {family}").choices(range(100, self._vocabulary), k=self._arguments.prefix)
        return prefix + self._suffixes.choices(range(100, self._vocabulary), k=self._arguments.suffix)


async def ask(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int) -> Answer:
    """Send a streamed request and time it."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    at_s = time.monotonic()
    first_s = 0.0
    usage: dict[str, object] = {}
    error: str | None = None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if response.status_code != 200:
                    error = line or error
                elif line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    error = chunk["error"]["message"] if "error" in chunk else error
                    usage = chunk.get("usage") or usage
                    first_s = first_s or (time.monotonic() if chunk.get("choices") else 0.0)
    except httpx.HTTPError as broken:
        error = repr(broken)
    details = usage.get("prompt_tokens_details") or {}
    assert isinstance(details, dict)
    numbers = [int(str(usage.get(name, 0))) for name in ("prompt_tokens", "completion_tokens")]
    cached = int(details.get("cached_tokens", 0))
    if not usage:
        error = error or "no usage came"
    return Answer(at_s, first_s or at_s, time.monotonic(), numbers[0], cached, numbers[1], bool(first_s), error)


class Server:
    """`realizar serve` with replicas. Args: in_turn: replicas are taken in turn."""

    def __init__(self, arguments: argparse.Namespace, *, in_turn: bool) -> None:
        words = ["serve", arguments.model, "--replicas", str(arguments.replicas), "--port", "0"]
        words += ["--context-length", "2048", "--log-level", "warning", *arguments.option]
        program = [__file__, "--in-turn"] if in_turn else ["-m", "realizar"]
        self.process = subprocess.Popen([sys.executable, *program, *words], stderr=subprocess.PIPE, text=True)
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.match(r"ready: (\S+)", line):
                self.url = found[1]
                break
        if not self.url:
            raise SystemExit("the server did not become ready")
        self._rest = asyncio.create_task(asyncio.to_thread(self._drop_lines))

    def _drop_lines(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(f"    server: {line.rstrip()}", file=sys.stderr)

    def engine_pids(self) -> list[int]:
        """The engines' processes, in the order of their start."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for each in children for pid in each.read_text(encoding="ascii").split()]

    async def close(self) -> None:
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 60)
        await self._rest


@asynccontextmanager
async def running(arguments: argparse.Namespace, *, in_turn: bool = False) -> AsyncIterator[tuple[Server, Load]]:
    """A server, and a load for it."""
    server = Server(arguments, in_turn=in_turn)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=_START_S, limits=limits) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            yield server, Load(arguments, client, model)
    finally:
        await server.close()


class Load:
    """Streams of requests to one server."""

    def __init__(self, arguments: argparse.Namespace, client: httpx.AsyncClient, model: str) -> None:
        self.arguments, self.client, self.model = arguments, client, model
        self._prompts = Prompts(arguments)

    async def run(
        self, part: str, num_each: int | None = None, until: Callable[[], bool] | None = None
    ) -> list[Answer]:
        """All streams, each with so many requests or until a condition holds; stream n begins with family n."""
        families = self.arguments.families

        async def stream(number: int) -> list[Answer]:
            answers: list[Answer] = []
            while len(answers) < num_each if num_each is not None else until is not None and not until():
                prompt = self._prompts.of(part, (number + len(answers)) % families)
                answers.append(await ask(self.client, self.model, prompt, self.arguments.tokens))
            return answers

        done = await asyncio.gather(*(stream(number) for number in range(self.arguments.streams)))
        return [answer for answers in done for answer in answers]

    async def alone(self, part: str, family: int) -> Answer:
        """One request, while no other is open."""
        return await ask(self.client, self.model, self._prompts.of(part, family), self.arguments.tokens)

    async def figures(self, name: str) -> dict[str, float]:
        """A figure of each replica."""
        text = (await self.client.get("/metrics")).text
        found = re.findall(rf'^realizar:replica_{name}{{.*replica="(\d+)".*}} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    async def num_ready(self) -> int:
        text = (await self.client.get("/metrics")).text
        return len(re.findall(r'^realizar:replica_state{.*state="ready"} 1.0$', text, re.MULTILINE))


@dataclass(frozen=True)
class Figures:
    """A load's figures: tokens that came out a second, and cached tokens of those that one ideal cache would find."""

    tokens_per_s: float
    share_of_ideal: float


async def measure(load: Load, part: str) -> Figures:
    """Run the load and print its figures."""
    started_s = time.monotonic()
    answers = await load.run(part, load.arguments.each)
    seconds = time.monotonic() - started_s
    whole = load.arguments.prefix // _BLOCK_TOKENS * _BLOCK_TOKENS
    ideal = (len(answers) - load.arguments.families) * whole
    cached = sum(each.cached_tokens for each in answers)
    rate = sum(each.output_tokens for each in answers) / seconds
    for name, chosen in (("cached", True), ("uncached", False)):
        times = [1000 * (each.first_s - each.at_s) for each in answers if (each.cached_tokens >= whole) is chosen]
        if times:
            print(f"  {len(times)} {name} first tokens: median {statistics.median(times):.0f} ms")
    prompts = await load.figures("prompt_tokens_total")
    print(f"  prompt tokens by replica: {prompts}; failed: {sum(each.error is not None for each in answers)}")
    print(f"  {len(answers)} answers in {seconds:.1f} s, {rate:.0f} tokens/s; cached {cached} of {ideal}", flush=True)
    return Figures(rate, cached / ideal)


async def first_tokens(load: Load) -> float:
    """Times of requests that come alone: how many times sooner a cached prefix gives the first token."""
    medians = []
    for name in ("uncached", "cached"):
        answers = [await load.alone("first", family) for family in range(load.arguments.families)]
        medians.append(statistics.median(1000 * (each.first_s - each.at_s) for each in answers))
        tokens = statistics.mean(each.cached_tokens for each in answers)
        print(f"  {name}: first token after {medians[-1]:.0f} ms (median), {tokens:.0f} tokens cached", flush=True)
    return medians[0] / medians[1]


async def kill_one(server: Server, load: Load) -> bool:
    """Kill an engine under load: what fails, and when, and when the engine is back."""
    killed_s, back_s = [0.0], [0.0]

    async def kill() -> None:
        await asyncio.sleep(load.arguments.settle)
        by_replica = await load.figures("num_requests_running")
        print(f"  running by replica: {by_replica}")
        killed_s[0] = time.monotonic()
        os.kill(server.engine_pids()[1], signal.SIGKILL)
        await asyncio.sleep(0.5)
        while await load.num_ready() < load.arguments.replicas:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.1)
        back_s[0] = time.monotonic()
        await asyncio.sleep(load.arguments.settle)
        ended.set()

    ended = asyncio.Event()
    killing = asyncio.create_task(kill())
    answers = await load.run("routed", until=ended.is_set)
    await killing
    failed = [each for each in answers if each.error is not None]
    late = [each.end_s - killed_s[0] for each in failed]
    meanwhile = [each for each in answers if killed_s[0] < each.at_s < back_s[0] and each.error is None]
    print(f"  {len(answers)} answers, {len(failed)} failed: {sorted({str(each.error) for each in failed})}")
    print(f"  of them begun: {sum(each.has_begun for each in failed)}; last error after {max(late, default=0):.2f} s")
    print(f"  back after {back_s[0] - killed_s[0]:.1f} s; {len(meanwhile)} answers meanwhile", flush=True)
    return all(each.has_begun for each in failed) and max(late, default=0.0) < 1.0


async def restart_all(server: Server, load: Load) -> bool:
    """Restart the replicas one by one under load; true if nothing failed."""
    before = set(server.engine_pids())
    ended = asyncio.Event()

    async def restart() -> None:
        await asyncio.sleep(load.arguments.settle)
        started_s = time.monotonic()
        server.process.send_signal(signal.SIGHUP)
        while (  # noqa: ASYNC110 - as above
            set(server.engine_pids()) & before or await load.num_ready() < load.arguments.replicas
        ):
            await asyncio.sleep(0.2)
        print(f"  all {load.arguments.replicas} restarted in {time.monotonic() - started_s:.1f} s")
        ended.set()

    restarting = asyncio.create_task(restart())
    answers = await load.run("routed", until=ended.is_set)
    await restarting
    failed = [each.error for each in answers if each.error is not None]
    print(f"  {len(answers)} answers, {len(failed)} failed: {sorted(set(map(str, failed)))}", flush=True)
    return not failed


async def run_parts(arguments: argparse.Namespace) -> int:
    """All parts; the exit status."""
    wishes: list[tuple[str, bool]] = []
    routed: Figures | None = None
    async with running(arguments) as (server, load):
        if "routed" in arguments.parts:
            print("routed by prefix:")
            routed = await measure(load, "routed")
            wishes.append((f"cached share {routed.share_of_ideal:.3f} of ideal >= 0.95", routed.share_of_ideal >= 0.95))
        if "first" in arguments.parts:
            print("first tokens, one request at a time:")
            times = await first_tokens(load)
            wishes.append((f"first token {times:.1f} times sooner >= 5", times >= 5))
        if "kill" in arguments.parts:
            print("an engine is killed:")
            wishes.append(("only running requests failed, within a second", await kill_one(server, load)))
        if "restart" in arguments.parts:
            print("the replicas restart in turn:")
            wishes.append(("a rolling restart failed nothing", await restart_all(server, load)))
    if "turns" in arguments.parts:
        async with running(arguments, in_turn=True) as (_, load):
            print("round robin:")
            turns = await measure(load, "routed")
            if routed is not None:
                ratio = routed.tokens_per_s / turns.tokens_per_s
                wishes.append((f"throughput {ratio:.2f} of round robin's >= 1", ratio >= 1))
    for wish, holds in wishes:
        print(f"{'holds' if holds else 'FAILS'}: {wish}")
    return int(not all(holds for _, holds in wishes))


def main() -> int:
    if sys.argv[1:2] == ["--in-turn"]:
        vars(link)["PrefixRouter"] = TurnRouter
        from realizar.cli.main import main as realizar_main

        sys.argv = ["realizar", *sys.argv[2:]]
        realizar_main()
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--families", type=int, default=8)
    parser.add_argument("--each", type=int, default=4, help="requests of a stream")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that a family shares")
    parser.add_argument("--suffix", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--settle", type=float, default=8.0, help="seconds of load before a signal")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--option", action="append", default=[], help="of realizar serve, as --option=--threads=1")
    return asyncio.run(run_parts(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
