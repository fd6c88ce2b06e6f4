"""The scheduler's effects in seconds on a real model: gaps of streams, cached prefixes, drafts.

    python scripts/time_scheduling.py MODEL [gaps|prefix|drafts|conversation] [STREAMS]

gaps: the longest gap between tokens of a running stream while a prompt of 4,000 tokens is read, against its median,
with STREAMS (default 1) running. prefix: time to the first token of a prompt of 1,000 tokens, new and seen before.
drafts: tokens per second of greedy text that repeats itself, without and with 4 drafts. Three rounds of each; of these
three where none is named.

conversation: one of 32,000 random tokens (`--tokens`) in messages of 800, read cold; its next turn, with the answer and
a new message behind it; and with its fifth message edited. For each the time to the first token, and the prompt's
tokens found in the cache. The exit status is 1 where the next turn takes more than 3 % of the cold time, or nothing
before the edit is found.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import find_checkpoint, load_core
from realizar.request import Request
from realizar.sampling_params import SamplingParams

ROUNDS = 3
ANSWER, MESSAGE, NEW_MESSAGE = 64, 800, 200  # tokens
EDITED = 4  # the index of the fifth message
MOST_OF_COLD = 0.03
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
    names: dict[int, str] = {}
    while not read or len(times) < read + 100:
        deltas = core.step()
        names |= {start.number: start.request_id for start in deltas.starts}
        for name in [names[number] for number in deltas.number_list()]:
            if name == "stream 0":
                times.append(time.perf_counter())
            elif name == "long":
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
        if num_tokens := core.step().num_tokens:
            last = time.perf_counter()
            first, count = first or last, count + num_tokens
    return (count - 1) / (last - first)


@dataclass(frozen=True)
class Turn:
    """One request's cost.

    Attributes:
        first_s: time to the first token.
        num_tokens: of the prompt. num_cached: found in the cache.
        answer: token ids.
    """

    first_s: float
    num_tokens: int
    num_cached: int
    answer: tuple[int, ...]

    def __str__(self) -> str:
        computed = self.num_tokens - self.num_cached
        found = f"{self.num_cached} of {self.num_tokens} tokens cached, {computed} computed"
        return f"first token after {self.first_s:8.3f} s; {found}"


def ask(core: EngineCore, name: str, messages: Sequence[tuple[int, ...]]) -> Turn:
    """Read a conversation, whose messages end where the engine is told, and answer it."""
    prompt = tuple(token_id for message in messages for token_id in message)
    marks, end = [], 0
    for message in messages:
        end += len(message)
        marks.append(end)
    start, first_s, cached = time.perf_counter(), 0.0, 0
    answer: list[int] = []
    core.add(Request(name, (*prompt, 1, 2), GREEDY, ANSWER, prompt_marks=tuple(marks)))
    while core.has_work:
        deltas = core.step()
        for failure in deltas.failures:
            raise SystemExit(failure.error.message)
        for begun in deltas.starts:
            first_s, cached = time.perf_counter() - start, begun.num_cached_tokens
        answer += deltas.token_list()
    core.audit()
    return Turn(first_s, len(prompt) + 2, cached, tuple(answer))


def random_messages(core: EngineCore, num_tokens: int, message: int) -> list[tuple[int, ...]]:
    """So many tokens in messages of random ids."""
    rng = random.Random(1)
    vocab = core.spec.vocab_size
    return [tuple(rng.randrange(vocab) for _ in range(message)) for _ in range(num_tokens // message)]


def turns(core: EngineCore, num_tokens: int, message: int) -> tuple[Turn, Turn, Turn, int]:
    """The cold turn, the next one, and the edited one; and the tokens before the fifth message."""
    ask(core, "warm", random_messages(core, 2 * message, message)[1:])
    talk = random_messages(core, num_tokens, message)
    cold = ask(core, "cold", talk)
    following = ask(core, "next", [*talk, cold.answer, talk[0][:NEW_MESSAGE]])
    edited = [*talk[:EDITED], (7, *talk[EDITED][1:]), *talk[EDITED + 1 :]]
    return cold, following, ask(core, "edit", edited), EDITED * message


def time_conversation(core: EngineCore, num_tokens: int) -> bool:
    """Print the turns. True if the next one took a small share of the cold time and the edit found something."""
    cold, following, edit, before = turns(core, num_tokens, MESSAGE)
    for name, turn in (("cold", cold), ("next turn", following), ("fifth message edited", edit)):
        print(f"{name:<21} {turn}")
    share = following.first_s / cold.first_s
    print(f"the next turn takes {share:.2%} of the cold time; {core.cache.snapshots.counts}")
    return share <= MOST_OF_COLD and 0 < edit.num_cached <= before


def main() -> int:
    """Print a line per round."""
    parser = argparse.ArgumentParser(description="Gaps of streams, cached prefixes and drafts, on a real model.")
    parser.add_argument("model", help="a path, a pulled name or a Hugging Face name")
    parser.add_argument("what", nargs="?", choices=("gaps", "prefix", "drafts", "conversation", "all"), default="all")
    parser.add_argument("streams", type=int, nargs="?", default=1, help="streams that run in `gaps` (default 1)")
    parser.add_argument("--tokens", type=int, default=32_000, help="of `conversation` (default 32,000)")
    given = parser.parse_args()
    checkpoint = find_checkpoint(given.model)
    if given.what == "conversation":
        core = load_core(checkpoint, EngineConfig(context_length=2 * given.tokens + MESSAGE, max_running=2))
        done = time_conversation(core, given.tokens)
        core.close()
        return int(not done)
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
        before, plain = drafting.scheduler.counts, decode_tokens_per_s(core, round_)
        drafted, after = decode_tokens_per_s(drafting, round_), drafting.scheduler.counts
        accepted = after.accepted_tokens - before.accepted_tokens
        proposed = after.draft_tokens - before.draft_tokens
        print(f"drafts: {plain:.1f} tokens/s, with drafts {drafted:.1f}; {accepted} of {proposed} accepted")
    drafting.close()


if __name__ == "__main__":
    sys.exit(main())
