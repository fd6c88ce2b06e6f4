"""Mixed load over HTTP for a while: memory of both processes, what was answered, and the engine's audit.

    python scripts/soak.py smollm2:135m [--minutes 20] [--clients 24] [--kv-cache-bytes 400000000]
    python scripts/soak.py hybrid.gguf --host-snapshot-bytes 4000000 --speculative-tokens 4 [--drafter auto]

Clients run in a process of their own: streams and whole answers, several choices, log-probabilities, grammars,
tools, embeddings, prompts that begin alike, conversations of several turns, and one in four leaves before its answer is
complete. A line every half minute; the exit status is 1 where the audit found something, an engine died, a request
failed, anything is left open, or a process has more memory in the end than at half time, by over 5 %.
`write_tiny_model` of `tests/tiny_model.py` makes small models, hybrids too, with a vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from realizar.config import EngineConfig
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.loading import find_checkpoint
from realizar.engine.process.messages import Load
from realizar.engine.process.supervisor import ProcessLink
from realizar.server.app import create_app
from realizar.server.http.listen import uvicorn_config
from realizar.server.run import open_port
from realizar.server.served_model import make_served_model
from realizar.server.settings import ServerSettings
from realizar.tokenizer.stop_checker import StopChecker

_WORDS = ("river", "stone", "letter", "garden", "winter", "signal", "copper", "ladder", "market", "thunder")
_REPORT_S = 30.0
_ENOUGH_ROWS = 16
_MOST_GROWTH = 1.05  # of a process's memory in the second half
_PLACES = {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}}
_PARAMETERS = {"type": "object", "properties": _PLACES, "required": list(_PLACES), "additionalProperties": False}
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": _PARAMETERS, "strict": True}}]
_CONVERSATIONS, _TURNS = 12, 5


def make_request(rng: random.Random, context: int) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    shared = " ".join(_WORDS * rng.choice((0, 1, 8)))
    text = f"{shared} {' '.join(rng.choices(_WORDS, k=rng.choice((1, 10, 80))))}"
    kind = rng.random()
    if kind < 0.1:
        return "/v1/embeddings", {"model": "soak", "input": [text, text[::-1]]}
    body: dict[str, Any] = {
        "model": "soak",
        "max_tokens": rng.choice((1, 16, 64, min(300, context // 4))),
        "temperature": rng.choice((0, 0.8)),
        "n": rng.choice((1, 1, 1, 3)),
        "stream": rng.random() < 0.6,
    }
    if kind < 0.5:
        body |= {"prompt": text, "logprobs": rng.choice((None, 3)), "echo": rng.random() < 0.1}
        return "/v1/completions", body
    body["messages"] = [*_earlier_turns(rng), {"role": "user", "content": text}]
    if kind < 0.6:
        body["response_format"] = {"type": "json_object"}
    elif kind < 0.7:
        body |= {"tools": _TOOLS, "tool_choice": rng.choice(("auto", "required"))}
    return "/v1/chat/completions", body


def _earlier_turns(rng: random.Random) -> list[dict[str, str]]:
    """Messages of one of a few conversations, up to any of its turns."""
    talk = random.Random(rng.randrange(_CONVERSATIONS))
    turns = [" ".join(talk.choices(_WORDS, k=talk.choice((2, 6, 15)))) for _ in range(2 * _TURNS)]
    roles = ("user", "assistant") * _TURNS
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)][
        : 2 * rng.randint(0, _TURNS)
    ]


async def _client(url: str, seed: int, until_s: float, context: int, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while time.time() < until_s:
            path, body = make_request(rng, context)
            patience_s = rng.uniform(0, 3) if rng.random() < 0.25 else 120
            try:
                async with asyncio.timeout(patience_s), client.stream("POST", path, json=body) as response:
                    content = b"".join([part async for part in response.aiter_bytes()])
            except TimeoutError:
                counts["left"] += 1
                continue
            status = "too long" if b'"context_length_exceeded"' in content else str(response.status_code)
            broken = body.get("stream") and status == "200" and not content.endswith(b"data: [DONE]\n\n")
            counts["broken" if broken else status] += 1
            if response.status_code == 429:
                await asyncio.sleep(rng.uniform(0.2, 1))


async def run_clients(url: str, clients: int, seconds: float, context: int) -> None:
    """Load a server; prints what came of the requests, in JSON."""
    counts: Counter[str] = Counter()
    until_s = time.time() + seconds
    await asyncio.gather(*(_client(url, seed, until_s, context, counts) for seed in range(clients)))
    print(json.dumps(counts))


def resident_mb(pid: int | str) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


async def _report(engine: AsyncEngine, started_s: float) -> tuple[str | None, list[float]]:
    """What the audit says, and MB of the API process and the engine."""
    fault = await engine.audit()
    stats = await engine.stats()
    memory = [resident_mb("self"), resident_mb(engine.info.pid)]
    print(
        f"{time.monotonic() - started_s:6.0f} s  API {memory[0]:.0f} MB, engine {memory[1]:.0f} MB;"
        f" {stats.num_running} run, {stats.num_waiting} wait;"
        f" {stats.generation_tokens} tokens, {stats.num_preemptions} preemptions,"
        f" {stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens cached,"
        f" {stats.accepted_tokens} of {stats.draft_tokens} drafts right; snapshots: {stats.num_snapshots} and"
        f" {stats.num_host_snapshots} on the host, {stats.snapshots_taken} taken, {stats.snapshots_restored} restored,"
        f" {stats.snapshots_fetched} of them fetched, {stats.snapshots_dropped} dropped; audit: {fault or 'clean'}",
        flush=True,
    )
    return fault, memory


async def soak(arguments: argparse.Namespace) -> int:
    """Serve, have clients load the server, report; the exit status."""
    checkpoint = find_checkpoint(arguments.model)
    served = make_served_model(checkpoint, ("soak",), arguments.context_length)
    config = EngineConfig(
        context_length=arguments.context_length,
        kv_cache_bytes=arguments.kv_cache_bytes,
        host_snapshot_bytes=arguments.host_snapshot_bytes,
        max_running=_ENOUGH_ROWS,
        drafter=arguments.drafter,
        speculative_tokens=arguments.speculative_tokens,
    )
    engine = AsyncEngine(
        ProcessLink(Load(str(checkpoint.path), config)),
        lambda sampling: StopChecker(served.tokenizer, sampling),
        served.tokenizer.eos_ids,
    )
    settings = ServerSettings(embeddings="last", log_requests=False)
    listener = open_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn_config(create_app(engine, served, settings), settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await engine.start()
    await engine.wait_ready()
    options = {"url": url, "minutes": arguments.minutes, "clients": arguments.clients}
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, __file__, arguments.model, f"--context-length={arguments.context_length}", *words]
    clients = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    ended = asyncio.create_task(clients.communicate())
    started_s = time.monotonic()
    reports = [await _report(engine, started_s)]
    while not (await asyncio.wait((ended,), timeout=_REPORT_S))[0]:
        reports.append(await _report(engine, started_s))
    if clients.returncode:
        print(f"the clients ended with exit status {clients.returncode} before they could count their answers")
    counts = json.loads(ended.result()[0] or b"{}")
    await asyncio.sleep(1)
    reports.append(await _report(engine, started_s))
    stats = await engine.stats()
    grown = [end / half for half, end in zip(reports[len(reports) // 2][1], reports[-1][1], strict=True)]
    growth = " and ".join(f"{share - 1:+.1%}" for share in grown)
    print(f"answers: {counts}; engines lost: {engine.num_restarts}; memory since half time: {growth}")
    left_open = stats.num_running + stats.num_waiting + stats.num_used_blocks
    server.should_exit = True
    await serving
    await engine.close()
    failed = clients.returncode or left_open or engine.num_restarts or set(counts) - {"200", "429", "left", "too long"}
    return int(any(fault for fault, _ in reports) or bool(failed) or max(grown) > _MOST_GROWTH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--kv-cache-bytes", type=int, default=400_000_000)
    parser.add_argument("--host-snapshot-bytes", type=int, default=0)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--speculative-tokens", type=int)
    parser.add_argument("--url", help="load this server instead of starting one")
    arguments = parser.parse_args()
    if arguments.url is None:
        return asyncio.run(soak(arguments))
    asyncio.run(run_clients(arguments.url, arguments.clients, arguments.minutes * 60, arguments.context_length))
    return 0


if __name__ == "__main__":
    sys.exit(main())
