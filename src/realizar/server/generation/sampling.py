"""`build_sampling` makes `SamplingParams` from a request's wishes and the model's defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from realizar.sampling_params import SAMPLERS, SamplingParams, StructuredOutput
from realizar.server.errors import refused, unsupported
from realizar.server.served_model import ServedModel
from realizar.tokenizer.tokenizer import Tokenizer

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
"""Each new text is searched for every stop string. OpenAI allows 4 of them."""
MAX_LOGPROBS = 20
MAX_DRY_BREAKERS = 64
MAX_PRIORITY = 100
MAX_LISTED_IDS = 1 << 16
"""Entries of stop_token_ids, and of logit_bias, times the number of prompts: each prompt sends them to the engine."""
_DRY_BREAKERS = ("\n", ":", '"', "*")  # recommended by DRY's author, for requests that turn DRY on without breakers

PLAIN_FIELDS = ("n", "seed", *(each.name for each in SAMPLERS), "min_tokens", "ignore_eos")
"""Fields of `SamplingParams` that a request sets as they are. `max_tokens` is not among them: its names differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWishes:
    """A request's wishes about sampling, in any dialect. What is not given (None) is the model's default.

    Attributes:
        plain: values by `PLAIN_FIELDS` and `max_tokens`, of those that the request gives. `max_tokens` given as None is
            the rest of the context.
        stop: a stop string, or several.
        logit_bias: added to logits, by token ids in decimal.
        dry_sequence_breakers: texts; the last token of each is a breaker.
        logprobs: most probable tokens to list for each token; None without log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.
        structured: the constraint on the answer.
    """

    plain: Mapping[str, Any]
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[str, float] | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None

    @property
    def bounds_answer(self) -> bool:
        """True if the request says how long an answer may be. A default may be more than the context leaves."""
        return "max_tokens" in self.plain


def build_sampling(wishes: SamplingWishes, model: ServedModel) -> SamplingParams:
    """Make the sampling parameters of a request.

    Raises InvalidRequestError or ApiError, naming the field, where a value is out of range.
    """
    tokenizer, default = model.tokenizer, model.default_sampling
    changes: dict[str, Any] = {
        **wishes.plain,
        "logprobs": wishes.logprobs,
        "prompt_logprobs": wishes.prompt_logprobs,
        "structured": wishes.structured,
    }
    if wishes.stop is not None:
        changes["stop"] = _stops(wishes.stop)
    if wishes.stop_token_ids is not None:
        changes["stop_token_ids"] = tuple(wishes.stop_token_ids)
    if wishes.logit_bias:
        changes["logit_bias"] = {_bias_id(key, tokenizer): bias for key, bias in wishes.logit_bias.items()}
    if wishes.dry_sequence_breakers is not None:
        changes["dry_sequence_breakers"] = _breaker_ids(wishes.dry_sequence_breakers, tokenizer)
    elif wishes.plain.get("dry_multiplier", default.dry_multiplier) and not default.dry_sequence_breakers:
        changes["dry_sequence_breakers"] = _breaker_ids(_DRY_BREAKERS, tokenizer)
    return replace(default, **changes)


def fitting(sampling: SamplingParams, room: int) -> tuple[SamplingParams, bool]:
    """Sampling of at most the tokens that the context leaves, and True if these are fewer than were asked for."""
    if sampling.max_tokens is None or not 0 < room < sampling.max_tokens:
        return sampling, False
    return replace(sampling, max_tokens=room), True


def check_listed_ids(sampling: SamplingParams, num_prompts: int) -> None:
    """Bound the lists of ids times the number of prompts, as each prompt sends the lists to the engine.

    Raises ApiError: 400; the lists are too long.
    """
    for name in ("stop_token_ids", "logit_bias"):
        size = len(getattr(sampling, name) or ())
        if size * num_prompts > MAX_LISTED_IDS:
            allowed = f"at most {MAX_LISTED_IDS // num_prompts} are allowed with so many prompts"
            message = f"{name} has {size} entries for each of {num_prompts} prompts; {allowed}"
            raise refused(message, name, "array_too_long")


def check_top(value: int | None, param: str) -> int | None:
    """Raise ApiError (400) for a number of top log-probabilities out of range."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise refused(f"{param} must be between 0 and {MAX_LOGPROBS}, not {value}", param, "invalid_value")
    return value


def listed_logprobs(top: int | None, *, wanted: bool | None, needs: str = "logprobs to be true") -> int | None:
    """Most probable tokens to list for each token, of a request's `top_logprobs`; None without log-probabilities.

    Raises ApiError: 400; it is out of range, or log-probabilities, which the request `needs` for it, are not wanted.
    """
    if top and not wanted:
        raise refused(f"top_logprobs needs {needs}", "top_logprobs", "invalid_value")
    listed = check_top(top, "top_logprobs") or 0
    return listed if wanted else None


def check_priority(priority: int | None, *, allowed: bool) -> int:
    """Check a request's priority; None is 0, and no other is `allowed` where priorities are turned off.

    Raises ApiError: 400; it is out of range, or not allowed.
    """
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise refused(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}", "priority", "invalid_value"
        )
    if priority and not allowed:
        reason = "is turned off: it would let a client overtake others (--allow-request-priority turns it on)"
        raise unsupported("priority", reason)
    return priority or 0


def _stops(given: str | Sequence[str]) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given)
    if len(stops) > MAX_STOPS:
        raise refused(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop", "array_too_long")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise refused(f"a stop string may have {MAX_STOP_CHARACTERS} characters at most", "stop", "string_too_long")
    return stops


def _bias_id(key: str, tokenizer: Tokenizer) -> int:
    token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1
    if str(token_id) != key or not 0 <= token_id < tokenizer.vocab_size:  # "07" would be a second name of 7
        message = f"logit_bias names {key[:40]!a}, which is not a token id from 0 to {tokenizer.vocab_size - 1}"
        raise refused(message, "logit_bias", "invalid_value")
    return token_id


def _breaker_ids(breakers: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The last token of each string when it follows a letter, as in a sentence."""
    if len(breakers) > MAX_DRY_BREAKERS or any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in breakers):
        param = "dry_sequence_breakers"
        message = f"{param} takes {MAX_DRY_BREAKERS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
        raise refused(message, param, "invalid_value")
    ids = {tokenizer.encode(f"a{text}", add_special=False, parse_special=False)[-1] for text in breakers}
    return tuple(sorted(ids))
