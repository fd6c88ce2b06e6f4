"""Prompt tokens that conversations on a hybrid compute, by the memory that snapshots and blocks have. No model runs.

    python scripts/snapshots/simulate_snapshots.py [--users 60] [--requests 1500] [--rewritten]

The real scheduler and cache, with made-up tokens: users take turns at random, each with a conversation that grows by a
message and an answer, and begins again at 12,000 tokens. The next turn has an answer as it was, or, with `--rewritten`,
other tokens in its place, as of templates that drop reasoning. Sizes are as in Qwen3.6-35B-A3B: a snapshot takes the
bytes of the keys and values of 3,150 tokens, and half of the cache's bytes are snapshots.
"""

from __future__ import annotations

import argparse
import random
import sys

import numpy as np

from realizar.batch import NOT_SAMPLED, ScheduledBatch, StepOutput
from realizar.kv_cache.manager import KVCacheManager
from realizar.request import Client, Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.scheduler import Scheduler

_BLOCK, _CONTEXT, _STEP = 32, 16_384, 4096
_TOKENS_OF_A_SNAPSHOT = 3150
_MESSAGE, _ANSWER, _LONGEST = (50, 1200), (50, 400), 12_000


def simulate(
    num_snapshots: int, on_host: int, block_tokens: int, users: int, requests: int, *, rewritten: bool
) -> tuple[float, int, int]:
    """The share of prompt tokens that is computed, and the snapshots that were fetched and dropped."""
    rng = random.Random(7)
    cache = KVCacheManager(
        [None], [block_tokens // _BLOCK], block_size=_BLOCK, num_rows=16, context_length=_CONTEXT,
        max_step_tokens=_STEP, has_state=True, num_snapshots=num_snapshots, num_host_snapshots=on_host,
    )  # fmt: skip
    cache.least_fetched_tokens = 36
    scheduler = Scheduler(cache)
    talks: list[list[int]] = [[] for _ in range(users)]
    marks: list[list[int]] = [[] for _ in range(users)]
    computed = total = 0
    for number in range(requests):
        user = min(int(rng.expovariate(3 / users)), users - 1)  # some talk more than others
        talk, ends = talks[user], marks[user]
        if len(talk) > _LONGEST:
            talk.clear()
            ends.clear()
        if not talk:
            talk.extend(range(600))  # a system message that all share
            ends.append(600)
        talk.extend(rng.randrange(1000, 9999) for _ in range(rng.randint(*_MESSAGE)))
        ends.append(len(talk))
        prompt = (*talk, 1, 2, 3)  # a generation prompt
        sampling = SamplingParams(temperature=0.0)
        client = Client(f"u{user}")
        most = rng.randint(*_ANSWER)
        scheduler.add(Request(f"r{number}", prompt, sampling, most, client=client, prompt_marks=tuple(ends)))
        answer: list[int] = []
        total += len(prompt)
        while scheduler.has_work:
            batch = scheduler.schedule()
            computed += batch.num_tokens - batch.num_decode_tokens
            if batch.columns.samples.any():
                answer.append(rng.randrange(1000, 9999))
            scheduler.update(batch, _answered(batch, answer))
            scheduler.take_deltas()
            scheduler.take_closed_rows()
        talk.extend(prompt[len(talk) :])
        talk.extend([rng.randrange(1000, 9999) for _ in answer] if rewritten else answer)
        ends.append(len(talk))
    counts = cache.snapshots.counts
    return computed / total, counts.fetched, counts.dropped


def _answered(batch: ScheduledBatch, answer: list[int]) -> StepOutput:
    sampled = np.where(batch.columns.samples, np.int32(answer[-1] if answer else 0), np.int32(NOT_SAMPLED))
    return StepOutput(sampled[:, None])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--users", type=int, default=60)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rewritten", action="store_true")
    arguments = parser.parse_args()
    print("snapshots  on the host  blocks of tokens  prompt tokens computed  fetched  dropped")
    for snapshots, on_host, times in (
        (40, 0, 1),
        (40, 20, 1),
        (40, 40, 1),
        (40, 80, 1),
        (40, 0, 2),
        (80, 0, 2),
        (120, 0, 3),
    ):
        tokens = 40 * _TOKENS_OF_A_SNAPSHOT * times
        share, fetched, dropped = simulate(
            snapshots, on_host, tokens, arguments.users, arguments.requests, rewritten=arguments.rewritten
        )
        print(f"{snapshots:9} {on_host:12} {tokens:17,} {share:22.1%} {fetched:8} {dropped:8}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
