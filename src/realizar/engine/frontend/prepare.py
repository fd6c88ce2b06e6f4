"""`prepare_request` makes a `Request`: it resolves every default and checks every id against the vocabulary."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from realizar.errors import InvalidRequestError
from realizar.request import NO_CLIENT, Client, Pooling, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams

_MOST_MARKS = 1024  # of one prompt: far more than there are snapshots for


class RequestFields(TypedDict, total=False):
    """Fields of a `Request` that its caller may give by keyword."""

    priority: int
    cache_salt: str | None
    pooling: Pooling | None
    client: Client
    reports_progress: bool
    embeddings: tuple[PromptEmbeddings, ...]
    prediction: tuple[int, ...]
    call_ids: tuple[int, ...]
    rope_positions: bytes


def prepare_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    max_request_tokens: int,
    end_ids: Collection[int] = (),
    score_only: bool = False,
    has_snapshots: bool = False,
    **fields: Unpack[RequestFields],
) -> Request:
    """Resolve and check a request. `EngineCore.add` checks later that it fits the engine.

    Args:
        max_request_tokens: tokens of prompt and output together; `max_tokens=None` uses all that are left.
        score_only: generate nothing; for `prompt_logprobs` alone.
        has_snapshots: the engine keeps snapshots of states, and wants to know where the prompt's messages end.
        fields: as in `Request`; a pooled request generates nothing.

    Raises:
        InvalidRequestError: an empty prompt, an id beyond the vocabulary, or parameters that leave no id to sample.
    """
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt is empty", "prompt")
    _check_ids(prompt_token_ids, vocab_size, "prompt")
    for name in ("logit_bias", "stop_token_ids", "dry_sequence_breakers"):
        _check_ids(getattr(sampling, name), vocab_size, name)
    for name, top in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if top is not None and top > vocab_size:
            raise InvalidRequestError(f"{name} is {top}, above the vocabulary's {vocab_size} tokens", name)
    stops = _stop_ids(sampling, end_ids, vocab_size)
    if score_only or fields.get("pooling") is not None:
        max_tokens = 0
    elif sampling.max_tokens is None:
        max_tokens = max(max_request_tokens - len(prompt_token_ids), 1)  # 1: refused, with the counts, on admission
    else:
        max_tokens = sampling.max_tokens
    fields["cache_salt"] = fields.get("client", NO_CLIENT).salt(fields.get("cache_salt"))
    marks = _message_ends(prompt_token_ids, end_ids, fields.get("embeddings", ())) if has_snapshots else ()
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=replace(
            sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            stop_token_ids=tuple(sorted(stops)),
        ),
        max_tokens=max_tokens,
        prompt_marks=marks,
        **fields,
    )


def _stop_ids(sampling: SamplingParams, end_ids: Collection[int], vocab_size: int) -> set[int]:
    """All ids that end an output. It raises InvalidRequestError if they leave no id to sample at first."""
    endless = sampling.ignore_eos and sampling.structured is None  # nothing but an end follows a complete grammar
    stops = {*sampling.stop_token_ids, *(() if endless else end_ids)}
    if sampling.min_tokens and sampling.structured is None and len(stops) >= vocab_size:
        raise InvalidRequestError(
            f"all {vocab_size} token ids end the output, but min_tokens forbids that at first", "min_tokens"
        )
    return stops


def _message_ends(
    prompt_token_ids: Sequence[int], end_ids: Collection[int], embeddings: Sequence[PromptEmbeddings]
) -> tuple[int, ...]:
    """Numbers of tokens after which a message ends: a template ends messages as the model ends its answers.

    The last one leaves out the generation prompt. Of very many, the first and the last ones count.
    """
    ends = frozenset(end_ids)
    places = [place for place, token_id in enumerate(prompt_token_ids, 1) if token_id in ends]
    marks = tuple([place for place in places if not any(run.start < place <= run.end for run in embeddings)])
    return marks if len(marks) <= _MOST_MARKS else (marks[0], *marks[1 - _MOST_MARKS :])


def _check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(f"{param} holds token id {wrong}; the vocabulary has 0 to {vocab_size - 1}", param)
