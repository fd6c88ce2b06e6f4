"""Admission checks for new requests, and for waiting requests whose prefix is still being computed."""

from __future__ import annotations

from collections.abc import Collection

from realizar.errors import CapacityError, ContextLengthError, InvalidRequestError
from realizar.kv_cache.manager import KVCacheManager, Prefix
from realizar.request import Request
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.sequence import Sequence


def check_request(request: Request, open_ids: Collection[str], context_length: int, cache: KVCacheManager) -> None:
    """Refuse a request that could never run.

    Raises:
        InvalidRequestError: an empty prompt, an id in use, or a pooled request that is to generate.
        ContextLengthError: prompt and output exceed the context.
        CapacityError: the KV cache could not hold it even alone.
    """
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty", "prompt")
    if request.request_id in open_ids:
        raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
    if request.pooling is not None and request.max_tokens > 0:
        raise InvalidRequestError(f"a pooled request generates nothing, not {request.max_tokens} tokens", "max_tokens")
    prompt, total = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
    if total > context_length:
        raise ContextLengthError(
            f"{'the prompt is too long: ' if prompt >= context_length else ''}this model's maximum context length is "
            f"{context_length} tokens; the prompt has {prompt} and {request.max_tokens} are to be generated: "
            f"together {total}",
            "prompt" if prompt >= context_length else "max_tokens",
        )
    stored = max(prompt, total - 1)  # the last token is never read back
    if not cache.holds(stored):
        raise CapacityError(
            f"the request needs KV cache for {stored} tokens; the {'+'.join(map(str, cache.num_blocks))} "
            f"blocks of {cache.block_size} tokens hold at most {cache.max_tokens}"
        )


def waits_for_blocks(
    sequence: Sequence, prefix: Prefix, open_sequences: OpenSequences, cache: KVCacheManager
) -> bool:  # fmt: skip
    """True if a running sequence is about to compute the block after this sequence's cached prefix.

    The choices of one request wait for the first of them, and requests with the same long prefix for each other, so
    that the prefix is computed once. Where the model has a state, the block has to be followed by others up to one
    after which a snapshot is to be taken.
    """
    size, end = cache.block_size, prefix.num_tokens + cache.block_size
    if not cache.prefix_cache or end > sequence.most_cached_tokens:
        return False
    if cache.has_state:
        return _waits_for_snapshot(sequence, prefix.num_tokens, open_sequences, cache)
    index = prefix.num_tokens // size
    key = sequence.keys.of(sequence.token_ids)[index]
    computing = [other for other in open_sequences.about_to_compute(end) if cache.lets_find(other.own_row)]
    return any(other.keys.of(other.token_ids)[index] == key for other in computing)


def _waits_for_snapshot(
    sequence: Sequence, num_cached_tokens: int, open_sequences: OpenSequences, cache: KVCacheManager
) -> bool:  # fmt: skip
    """True if a running sequence is about to compute a longer prefix of this one, and a snapshot after it."""
    own = sequence.keys.of(sequence.token_ids)
    for other in open_sequences.running:
        for place in other.places if cache.lets_find(other.own_row) else ():
            index = place // cache.block_size - 1
            reaches = num_cached_tokens < place <= sequence.most_cached_tokens
            if reaches and other.keys.of(other.token_ids)[index] == own[index]:
                return True
    return False
