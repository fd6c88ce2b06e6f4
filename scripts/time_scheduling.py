"""The scheduler's effects in seconds on a real model: gaps of streams, cached prefixes, drafts.

    python scripts/time_scheduling.py MODEL [gaps|prefix|drafts] [STREAMS]

gaps: the longest gap between tokens of a running stream while a prompt of 4,000 tokens is read, against its median,
with STREAMS (default 1) running. prefix: time to the first token of a prompt of 1,000 tokens, new and seen before.
drafts: tokens per second of greedy text that repeats itself, without and with 4 drafts. Three rounds of each; of all
where none is named.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import replace

from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import find_checkpoint, load_core
from realizar.request import Request
from realizar.sampling_params import SamplingParams

ROUNDS = 3
GREEDY = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(context_length=6144, max_running=64, typical_request_tokens=2200)


def prompt(core: EngineCore, count: int, seed: int) -> tuple[int, ...]:
    """Random ids, which nothing has cached."""
    rng = random.Random(seed)
    return tuple(rng.randrange(core.spec.vocab_size) for _ in range(count))


def gaps(core: EngineCore, streams: int, round_: int) -> str:
    """A stream's gaps: 100 alone, those while the prompt is read, 100 after."""
    for index in range(streams):
        core.add(Request(f"stream {index}", prompt(core, 64, 100 * round_ + index), GREEDY, 2000))
    times: list[float] = []
    asked = read = 0
    while not read or len(times) < read + 100:
        for output in core.step():
            if output.request_id == "stream 0":
                times.append(time.perf_counter())
            elif output.request_id == "long":
                read = len(times)
        if len(times) >= 100 and not asked:
            asked = len(times)
            core.add(Request("long", prompt(core, 4000, 1000 + round_), GREEDY, 1))
    for index in range(streams):
        core.abort(f"stream {index}")
    core.step()
    found = [later - earlier for earlier, later in itertools.pairwise(times)]
    alone, during = statistics.median(found[:asked]), found[asked - 1 : read]
    whole = statistics.median(found)
    return (
        f"alone {1e3 * alone:.2f} ms, while reading median {1e3 * statistics.median(during):.2f} and longest "
        f"{1e3 * max(during):.2f}: {max(during) / whole:.2f}x the median of all {len(found)}, "
        f"{max(during) / alone:.2f}x alone; read in {sum(during):.2f} s"
    )


def first_token_s(core: EngineCore, ids: tuple[int, ...]) -> float:
    """Seconds from the request to its first token."""
    start = time.perf_counter()
    core.add(Request("a", ids, GREEDY, 1))
    while core.has_work:
        core.step()
    return time.perf_counter() - start


def prefix(core: EngineCore, round_: int) -> str:
    """Prompts that share their first 1,000 tokens and differ in the end."""
    ids = prompt(core, 1000, 2000 + round_)
    new, seen = first_token_s(core, (*ids, 1, 2)), first_token_s(core, (*ids, 3, 4))
    return f"first token after {1e3 * new:.1f} ms, with the prefix cached {1e3 * seen:.1f}: {new / seen:.1f}x sooner"


def decode_tokens_per_s(core: EngineCore, round_: int) -> float:
    """Greedy text after a period of 40 tokens, four times over."""
    core.add(Request("a", prompt(core, 40, 3000 + round_) * 4, GREEDY, 257))
    first = last = count = 0.0
    while core.has_work:
        for output in core.step():
            last = time.perf_counter()
            first, count = first or last, count + len(output.token_ids)
    return (count - 1) / (last - first)


def main() -> int:
    """Print a line per round."""
    parser = argparse.ArgumentParser(description="Gaps of streams, cached prefixes and drafts, on a real model.")
    parser.add_argument("model", help="a path, a pulled name or a Hugging Face name")
    parser.add_argument("what", nargs="?", choices=("gaps", "prefix", "drafts", "all"), default="all")
    parser.add_argument("streams", type=int, nargs="?", default=1, help="streams that run in `gaps` (default 1)")
    given = parser.parse_args()
    checkpoint = find_checkpoint(given.model)
    core = load_core(checkpoint, CONFIG)
    for round_ in range(ROUNDS):
        if given.what in ("gaps", "all"):
            print(f"gaps, {given.streams} running: {gaps(core, given.streams, round_)}")
        if given.what in ("prefix", "all"):
            print(f"prefix: {prefix(core, round_)}")
    if given.what in ("drafts", "all"):
        time_drafts(core, load_core(checkpoint, replace(CONFIG, speculative_tokens=4)))
    core.close()
    return 0


def time_drafts(core: EngineCore, drafting: EngineCore) -> None:
    """Greedy text that repeats itself, from an engine without drafts and from one with them, which is closed."""
    for round_ in range(ROUNDS):
        before, plain = drafting.counts, decode_tokens_per_s(core, round_)
        drafted, after = decode_tokens_per_s(drafting, round_), drafting.counts
        accepted = after.accepted_tokens - before.accepted_tokens
        proposed = after.draft_tokens - before.draft_tokens
        print(f"drafts: {plain:.1f} tokens/s, with drafts {drafted:.1f}; {accepted} of {proposed} accepted")
    drafting.close()


if __name__ == "__main__":
    sys.exit(main())
