"""Clients of mixed kinds on the real scheduler and a made-up device, in simulated time: what a mix and a policy give.

    python scripts/simulate_mix.py --seconds 60 --settle 10
    python scripts/simulate_mix.py --clients 160 --words 1-3700 --tokens 1-400 --leave 0.45

The requests are those of `cuda_mix.py`: lengths, clients that leave, each client's next request when one ends. A step
takes what its padded tokens, its decodes, and the tiles of its prompts' attention take; the defaults are near those of
a 1B shape on an H200. Nothing is computed, so that minutes of load take seconds, always the same ones. Prints prompt
and generated tokens a second as `cuda_mix.py` counts them, then of the requests that ended once the load had settled.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from realizar.backends.cuda.shapes import padded_tokens, token_counts
from realizar.batch import NOT_SAMPLED, ScheduledBatch, StepOutput
from realizar.bench.serve.dialects import REALIZAR
from realizar.bench.serve.workload import Lengths, PlannedRequest, Workload, draw_request
from realizar.kv_cache.manager import KVCacheManager
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Pace, Policy
from realizar.scheduler.scheduler import Scheduler

CONTEXT, BLOCK, TILE, MOST_TOKENS = 10_240, 16, 64, 4096
CHOICES = {"choices": 3}  # by kind, of a request; 1 of others


@dataclass(frozen=True)
class Device:
    """Seconds of a step's parts."""

    step_s: float = 0.45e-3
    decode_s: float = 5e-6
    token_s: float = 6.2e-6  # of a step with prompts, padded
    tile_s: float = 3.5e-8  # of a tile of prompt tokens, for each token before it
    host_s: float = 0.4e-3

    def seconds(self, batch: ScheduledBatch) -> float:
        """The time of a step on the device."""
        columns, tokens = batch.columns, batch.num_tokens
        chunks = ~columns.are_decodes
        if not chunks.any():
            return self.step_s + self.decode_s * tokens
        tiles = -(-columns.num_tokens[chunks] // TILE)
        attended = float((tiles * (TILE + columns.num_context_tokens[chunks])).sum())
        padded = padded_tokens(tokens, MOST_TOKENS)
        return (
            self.step_s + self.decode_s * (len(columns) - len(tiles)) + self.token_s * padded + self.tile_s * attended
        )


@dataclass
class Sent:
    """A request under way, times in simulated seconds."""

    request: PlannedRequest
    due_s: float
    times_s: list[float] = field(default_factory=list)  # of tokens
    open_choices: int = 1


@dataclass
class Load:
    """The clients' side."""

    work: Workload
    now_s: float = 0.0
    number: int = 0
    under_way: dict[str, Sent] = field(default_factory=dict)
    disconnects: list[tuple[float, str]] = field(default_factory=list)
    ended: list[tuple[float, Sent]] = field(default_factory=list)

    def send(self, scheduler: Scheduler) -> None:
        """One client's next request."""
        drawn = draw_request(self.work, self.number, REALIZAR, "m")
        name, choices = str(self.number), CHOICES.get(drawn.kind, 1)
        self.number += 1
        prompt = (self.number, *range(1, drawn.prompt_length))
        self.under_way[name] = Sent(drawn, self.now_s, open_choices=choices)
        if drawn.leave_after_s is not None:
            heapq.heappush(self.disconnects, (self.now_s + drawn.leave_after_s, name))
        scheduler.add(
            Request(name, prompt, SamplingParams(n=choices, temperature=0.0), drawn.max_tokens, cache_salt=name)
        )

    def end(self, name: str, scheduler: Scheduler) -> None:
        """A request has ended, or its client left; the client sends another."""
        self.ended.append((self.now_s, self.under_way.pop(name)))
        self.send(scheduler)

    def leave(self, scheduler: Scheduler) -> None:
        """Clients whose patience is over leave."""
        while self.disconnects and self.disconnects[0][0] <= self.now_s:
            _, name = heapq.heappop(self.disconnects)
            if name in self.under_way:
                scheduler.abort(name)
                self.end(name, scheduler)

    def token(self, name: str, finished: bool, scheduler: Scheduler) -> None:
        """A token of a request came."""
        sent = self.under_way.get(name)
        if sent is None:
            return
        sent.times_s.append(self.now_s)
        sent.open_choices -= finished
        after = sent.request.leave_after_deltas
        if after is not None and len(sent.times_s) >= after:
            scheduler.abort(name)
            self.end(name, scheduler)
        elif not sent.open_choices:
            self.end(name, scheduler)


def run(
    load: Load, device: Device, clients: int, seconds: float, max_running: int, *, unpadded: bool = False
) -> tuple[list[int], list[float]]:
    """Put the load on a scheduler. Returns the tokens of each step, and the seconds of those of both sorts."""
    cache = KVCacheManager(
        (None,), [1_000_000], block_size=BLOCK, num_rows=max_running, context_length=CONTEXT,
        max_step_tokens=MOST_TOKENS, prefix_cache=True,
    )  # fmt: skip
    policy = Policy()
    sizes_padded = () if unpadded else tuple(token_counts(MOST_TOKENS))
    pace = Pace(policy.stretch, TILE, policy.least_step_s, sizes_padded)
    scheduler = Scheduler(
        cache, pace=pace, policy=policy,
        clock=lambda: load.now_s,
    )  # fmt: skip
    in_flight: deque[tuple[ScheduledBatch, float]] = deque()
    free_s, sizes, mixed_s = 0.0, list[int](), list[float]()
    names: dict[int, str] = {}
    for _ in range(clients):
        load.send(scheduler)
    while load.now_s < seconds:
        load.leave(scheduler)
        batch = scheduler.schedule()
        if batch.num_rows:
            took_s = device.seconds(batch)
            free_s = max(free_s, load.now_s + device.host_s) + took_s
            in_flight.append((batch, free_s))
            sizes.append(batch.num_tokens)
            if 0 < batch.num_decode_tokens < batch.num_tokens:
                mixed_s.append(took_s)
        load.now_s += device.host_s
        if len(in_flight) > 1 or not batch.num_rows:
            done, ready_s = in_flight.popleft()
            load.now_s = max(load.now_s, ready_s)
            sampled = np.where(done.columns.samples, 7, NOT_SAMPLED).astype(np.int32)
            scheduler.update(done, StepOutput(sampled[:, None]))
            deltas = scheduler.take_deltas()
            names |= {start.number: start.request_id for start in deltas.starts}
            ended = {end.number for end in deltas.ends}
            for number in deltas.number_list():
                load.token(names[number], number in ended, scheduler)
            scheduler.take_closed_rows()
    return sizes, mixed_s


def as_counted(load: Load, seconds: float) -> tuple[float, float]:
    """Prompt and generated tokens a second over the whole time: a prompt counts with its first token."""
    every = [*(sent for _, sent in load.ended), *load.under_way.values()]
    prompts = sum(sent.request.prompt_length for sent in every if sent.times_s)
    return prompts / seconds, sum(len(sent.times_s) for sent in every) / seconds


def settled(load: Load, settle_s: float, seconds: float) -> tuple[float, float]:
    """The same of the requests that ended after the first seconds, over the time since."""
    ended = [sent for time_s, sent in load.ended if time_s >= settle_s]
    prompts = sum(sent.request.prompt_length for sent in ended if sent.times_s)
    return prompts / (seconds - settle_s), sum(len(sent.times_s) for sent in ended) / (seconds - settle_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=160)
    parser.add_argument("--words", default="1-6000")
    parser.add_argument("--tokens", default="1-400")
    parser.add_argument("--leave", type=float, default=0.45)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=10.0)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--unpadded", action="store_true", help="the pace does not know to what steps are padded")
    given = parser.parse_args()
    work = Workload(
        seconds=given.seconds, concurrency=given.clients, seed=given.seed, leave_share=given.leave, salt="mix",
        prompt_length=Lengths.parse(given.words, "words"), output_tokens=Lengths.parse(given.tokens, "tokens"),
    )  # fmt: skip
    load = Load(work)
    sizes, mixed_s = run(load, Device(), given.clients, given.seconds, given.max_running, unpadded=given.unpadded)
    for name, (prompts, generated) in (
        ("as counted from the start", as_counted(load, given.seconds)),
        (f"requests that ended after {given.settle:g} s", settled(load, given.settle, given.seconds)),
    ):
        print(f"{name}: {prompts:,.0f} prompt and {generated:,.0f} generated tokens/s, {prompts / generated:.1f} to 1")
    first_s = [sent.times_s[0] - sent.due_s for _, sent in load.ended if sent.times_s]
    gaps = [gap for _, sent in load.ended for gap in np.diff(sent.times_s).tolist() if gap > 0]
    print(f"{len(load.ended)} requests ended, first token after {statistics.median(first_s):.2f} s in the median")
    print(f"gaps {1e3 * statistics.median(gaps):.1f} ms, 99.9 % under {1e3 * float(np.quantile(gaps, 0.999)):.1f}")
    print(f"steps of {statistics.mean(sizes):.0f} tokens, mixed ones {1e3 * statistics.mean(mixed_s):.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
