"""The requests of a load on a server: their arrival times, prompts and answer lengths. All are drawn from one seed, so
that two servers get the same requests. Standard library only.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from realizar.errors import InvalidRequestError

# Words that are one token, or nearly so, in the vocabularies of today's models.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy process music market sense nation plan college interest death experience
effect use class control care field development role effort rate heart drug show leader light voice wife police mind
difference period value building action authority model activity road table
"""
_WORDS = _TEXT.split()
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def any_words(rng: random.Random, count: int) -> list[str]:
    """Words drawn for a prompt."""
    return rng.choices(_WORDS, k=count)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> Lengths:
        """Parse `128` or `64-256`.

        Raises:
            InvalidRequestError: the text is neither, or the range is empty; names `param`.
        """
        match = _RANGE.fullmatch(text.strip())
        low = int(match.group(1)) if match else 0
        high = int(match.group(2) or low) if match else 0
        if not 1 <= low <= high:
            raise InvalidRequestError(
                f"{param} must be a length such as 128 or a range such as 64-256, not {text}", param
            )
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        """One of them."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Workload:
    """A load.

    Attributes:
        num_requests: of the load.
        prompt_words: words of each prompt; a word is a token, or nearly so.
        output_tokens: tokens of each answer.
        rate_per_s: mean rate of arrivals, at random times (Poisson); None where `concurrency` says when.
        concurrency: requests open at a time; the next starts when one ends.
        shared_words: words that all prompts start with, besides their own.
        seed: of everything drawn.
    """

    num_requests: int
    prompt_words: Lengths
    output_tokens: Lengths
    rate_per_s: float | None = None
    concurrency: int | None = None
    shared_words: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise InvalidRequestError("give either a rate of arrivals or a number of requests open at a time", "rate")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise InvalidRequestError(f"rate must be above 0, not {self.rate_per_s}", "rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidRequestError(f"concurrency must be at least 1, not {self.concurrency}", "concurrency")
        if self.num_requests < 1:
            raise InvalidRequestError(f"requests must be at least 1, not {self.num_requests}", "requests")
        if self.shared_words < 0:
            raise InvalidRequestError(f"shared_words must be at least 0, not {self.shared_words}", "shared_words")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load.

    Attributes:
        arrival_s: after the start; 0 where the number of open requests decides.
    """

    arrival_s: float
    prompt: str
    max_tokens: int


def plan_requests(work: Workload) -> list[PlannedRequest]:
    """The requests of a load, in the order of their arrival."""
    rng = random.Random(work.seed)
    shared = any_words(rng, work.shared_words)
    planned = []
    arrival_s = 0.0
    for _ in range(work.num_requests):
        if work.rate_per_s is not None:
            arrival_s += rng.expovariate(work.rate_per_s)
        words = [*shared, *any_words(rng, work.prompt_words.draw(rng))]
        planned.append(PlannedRequest(arrival_s, " ".join(words), work.output_tokens.draw(rng)))
    return planned
