"""Options of `realizar bench-serve` that say how much is sent, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, MaybeInteger, check_folder
from realizar.errors import InvalidRequestError

_CONCURRENCY = 16


@Parameter(name="*", group="Load", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load.

    Attributes:
        requests: requests in a round.
        rate: mean arrivals per second, at random times (open loop).
        concurrency: requests open at a time (closed loop); default 16 without --rate.
        prompt_words: words of a prompt, about a token each: 128 (the default), or 64-256.
        output_tokens: tokens of an answer: 64 (the default), or 32-128.
        shared_words: words that all prompts start with.
        chat: send chats instead of completions.
        ignore_eos: ask for answers of full length.
        rounds: times that every server gets the load, in turn.
        seed: of everything that is drawn.
        timeout_s: seconds that an answer may take.
        json_file: write all figures to this file.
    """

    requests: Integer = 64
    rate: float | None = None
    concurrency: MaybeInteger = None
    prompt_words: str | None = None
    output_tokens: str | None = None
    shared_words: Integer = 0
    chat: bool = False
    ignore_eos: Annotated[bool, Parameter(negative="--no-ignore-eos")] = True
    rounds: Integer = 1
    seed: Integer = 0
    timeout_s: float = 600.0
    json_file: Annotated[Path | None, Parameter(name="--json")] = None

    @property
    def open_at_once(self) -> int | None:
        """Requests open at a time; None where the rate says when they are sent."""
        return _CONCURRENCY if self.concurrency is None and self.rate is None else self.concurrency

    def check(self) -> None:
        """Check, before long work, what the load itself does not.

        Raises:
            InvalidRequestError: a number is out of range, or the figures can't be written.
        """
        if self.rounds < 1:
            raise InvalidRequestError(f"--rounds must be at least 1, not {self.rounds}", "rounds")
        if not self.timeout_s > 0:
            raise InvalidRequestError(f"--timeout-s must be above 0, not {self.timeout_s:g}", "timeout-s")
        check_folder(self.json_file)
