"""`build_sampling` makes `SamplingParams` from a request's fields and the model's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.server.errors import refused, unsupported
from realizar.server.protocol.sampling import GenerationFields
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
SAMPLER_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields of a request that have the same name in `SamplingParams`."""

_SAME_NAME = ("n", "seed", *SAMPLER_FIELDS, "min_tokens", "ignore_eos")


def build_sampling(
    fields: GenerationFields,
    model: ServedModel,
    *,
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured: StructuredOutput | None = None,
) -> SamplingParams:
    """Make the sampling parameters of a request.

    Args:
        max_tokens: None is the rest of the context; its field in the request is `max_tokens_field`.

    Raises:
        InvalidRequestError, ApiError: a value is out of range; names the field.
    """
    changes: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    _check_best_of(fields)
    tokenizer = model.tokenizer
    if fields.stop is not None:
        changes["stop"] = _stops(fields.stop)
    if fields.stop_token_ids is not None:
        changes["stop_token_ids"] = tuple(fields.stop_token_ids)
    if fields.logit_bias:
        changes["logit_bias"] = {_bias_id(key, tokenizer): bias for key, bias in fields.logit_bias.items()}
    multiplier = fields.dry_multiplier or (
        model.default_sampling.dry_multiplier if fields.dry_multiplier is None else 0
    )
    if fields.dry_sequence_breakers is not None:
        changes["dry_sequence_breakers"] = _breaker_ids(fields.dry_sequence_breakers, tokenizer)
    elif multiplier and not model.default_sampling.dry_sequence_breakers:
        changes["dry_sequence_breakers"] = _breaker_ids(_DRY_BREAKERS, tokenizer)
    changes["logprobs"] = logprobs
    changes["prompt_logprobs"] = prompt_logprobs
    changes["max_tokens"] = max_tokens
    changes["structured"] = structured
    try:
        return replace(model.default_sampling, **changes)
    except InvalidRequestError as error:
        if error.param == "max_tokens" and max_tokens_field != "max_tokens":
            raise InvalidRequestError(str(error).replace("max_tokens", max_tokens_field), max_tokens_field) from None
        raise


def check_listed_ids(sampling: SamplingParams, num_prompts: int) -> None:
    """Bound the lists of ids times the number of prompts, as each prompt sends the lists to the engine.

    Raises:
        ApiError: 400; the lists are too long.
    """
    for name in ("stop_token_ids", "logit_bias"):
        size = len(getattr(sampling, name) or ())
        if size * num_prompts > MAX_LISTED_IDS:
            raise refused(
                f"{name} has {size} entries for each of {num_prompts} prompts; at most {MAX_LISTED_IDS // num_prompts} "
                "are allowed with so many prompts",
                name,
                "array_too_long",
            )


def check_top(value: int | None, param: str) -> int | None:
    """Check a number of top log-probabilities.

    Raises:
        ApiError: 400; it is out of range.
    """
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise refused(f"{param} must be between 0 and {MAX_LOGPROBS}, not {value}", param, "invalid_value")
    return value


def _check_best_of(fields: GenerationFields) -> None:
    if fields.best_of is not None and fields.best_of != (1 if fields.n is None else fields.n):
        raise unsupported("best_of", "must equal n: no further answers are generated")


def check_priority(priority: int | None, *, allowed: bool) -> int:
    """Check a request's priority; None is 0.

    Args:
        allowed: True if requests may have a priority other than 0.

    Raises:
        ApiError: 400; it is out of range, or priorities are turned off.
    """
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise refused(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}", "priority", "invalid_value"
        )
    if priority and not allowed:
        raise unsupported(
            "priority",
            "is turned off: it would let a client overtake others (--allow-request-priority turns it on)",
        )
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
    if (
        str(token_id) != key or not 0 <= token_id < tokenizer.vocab_size
    ):  # refuses "07", which would be a second name of 7
        raise refused(
            f"logit_bias names {key[:40]!a}, which is not a token id from 0 to {tokenizer.vocab_size - 1}",
            "logit_bias",
            "invalid_value",
        )
    return token_id


def _breaker_ids(breakers: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The last token of each string when it follows a letter, as in a sentence."""
    if len(breakers) > MAX_DRY_BREAKERS or any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in breakers):
        raise refused(
            f"dry_sequence_breakers takes {MAX_DRY_BREAKERS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
            "dry_sequence_breakers",
            "invalid_value",
        )
    ids = {tokenizer.encode(f"a{text}", add_special=False, parse_special=False)[-1] for text in breakers}
    return tuple(sorted(ids))
