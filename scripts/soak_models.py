"""Several models that take turns in a bounded memory, asked for by many clients: no error, no stop, no byte too many.

    python scripts/soak_models.py smollm2:135m gemma3:270m COPY.gguf --memory 1000000000 [--minutes 10] [--clients 32]

Each client asks for the models in turn, streamed and whole; one request in ten leaves before its answer. Memory is that
of the engines' processes without pages of mapped files, looked at every half second. A line every half minute; the exit
status is 1 where an audit found something, a request failed, memory passed the bound, or anything is left open.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import uvicorn

from realizar.cli.options.several_models import SeveralModelsOptions
from realizar.cli.several_models import Wishes, make_shelf
from realizar.config import EngineConfig
from realizar.engine.process.begun import ENGINE_COMMAND
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app_of
from realizar.server.http.listen import uvicorn_config
from realizar.server.models.shelf import ModelShelf
from realizar.server.run import open_port
from realizar.server.settings import ServerSettings

_REPORT_S, _LOOK_S = 30.0, 0.5
_WORDS = ("river", "stone", "letter", "garden", "winter", "signal", "copper", "ladder", "market", "thunder")


def engine_bytes() -> int:
    """Memory of the engines' processes, without pages of mapped files."""
    children = Path("/proc/self/task").glob("*/children")
    return sum(_bytes_of(pid) for each in children for pid in each.read_text(encoding="ascii").split())


def _bytes_of(pid: str) -> int:
    """Bytes of a process; 0 for one that is only being started, which has this process's memory until then."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    if ENGINE_COMMAND[-1].encode() not in command:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


async def ask_in_turn(url: str, names: list[str], number: int, until_s: float, counts: Counter[str]) -> None:
    """Ask for the models in turn until a time, and count the answers by status."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        turn = number
        while time.monotonic() < until_s:
            turn += 1
            body = {
                "model": names[turn % len(names)],
                "prompt": " ".join(rng.choices(_WORDS, k=rng.choice((1, 10, 60)))),
                "max_tokens": rng.choice((1, 8, 32)),
                "stream": rng.random() < 0.5,
                "ignore_eos": True,
            }
            patience_s = rng.uniform(0, 5) if rng.random() < 0.1 else 600
            try:
                async with asyncio.timeout(patience_s), client.stream("POST", "/v1/completions", json=body) as response:
                    content = b"".join([part async for part in response.aiter_bytes()])
            except TimeoutError:
                counts["left"] += 1
                continue
            broken = body["stream"] and response.status_code == 200 and not content.endswith(b"data: [DONE]\n\n")
            counts["broken" if broken else str(response.status_code)] += 1


class Watch:
    """Looks at memory, and reports. Attributes: most: bytes. faults: of audits."""

    def __init__(self, shelf: ModelShelf, counts: Counter[str]) -> None:
        self._shelf, self._counts = shelf, counts
        self.most = 0
        self.faults: list[str] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        started_s = reported_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            self.most = max(self.most, await asyncio.to_thread(engine_bytes))
            if time.monotonic() - reported_s >= _REPORT_S:
                reported_s = time.monotonic()
                await self.report(reported_s - started_s)

    async def report(self, seconds: float) -> None:
        found = await self._shelf.audits()
        self.faults += [f"{name}: {fault}" for name, fault in found.items() if fault is not None]
        states = ", ".join(f"{each.names[0]} {each.state}" for each in self._shelf.listed())
        print(
            f"{seconds:6.0f} s  at most {self.most / 1e6:.0f} MB; {states}; {dict(self._counts)};"
            f" audits: {self.faults or 'clean'}",
            flush=True,
        )


async def soak(arguments: argparse.Namespace) -> int:
    """Serve, load the server, report; the exit status."""
    config = EngineConfig(context_length=1024, kv_cache_bytes=arguments.kv_cache_bytes, max_running=16)
    wishes = Wishes(config, lambda _: SamplingParams(), None, "warning")
    settings = ServerSettings(log_requests=False)
    shelf = make_shelf(arguments.models, SeveralModelsOptions(memory=arguments.memory), wishes, settings)
    names = [each.names[0] for each in shelf.listed()]
    needed = sum(each.num_bytes or 0 for each in shelf.listed())
    print(f"the sum of all is {needed / 1e6:.0f} MB of {arguments.memory / 1e6:.0f} MB", flush=True)
    listener = open_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn_config(create_app_of(shelf, settings), settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    counts: Counter[str] = Counter()
    watch = Watch(shelf, counts)
    watching = asyncio.create_task(watch.run())
    until_s = time.monotonic() + 60 * arguments.minutes
    await asyncio.gather(*(ask_in_turn(url, names, each, until_s, counts) for each in range(arguments.clients)))
    watching.cancel()
    await asyncio.sleep(1)
    await watch.report(60 * arguments.minutes)
    text = (await shelf.exposition(())).decode()
    print(*(line for line in text.splitlines() if line.startswith("realizar:model_loads_total{")), sep="\n")
    left_open = shelf.num_open
    server.should_exit = True
    await serving
    await shelf.close()
    print(f"answers: {dict(counts)}; at most {watch.most / 1e6:.0f} MB; left open: {left_open}")
    failed = set(counts) - {"200", "left"}
    return int(bool(failed or watch.faults or left_open or watch.most > arguments.memory or not counts["200"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kv-cache-bytes", type=int, default=60_000_000)
    return asyncio.run(soak(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
