"""The output of a request, made of what the backend gave its row."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from realizar.batch import RowOutput
from realizar.outputs import RowError, TokenLogprobs, TokenOutput
from realizar.scheduler.sequence import Gain, Sequence


def token_output(sequence: Sequence, gain: Gain, result: RowOutput, now_s: float) -> TokenOutput | None:
    """The output of one step for a sequence's request; None for a chunk of a prompt without results."""
    finish, num_tokens, logprobs = gain.finish_reason, len(gain.token_ids), result.logprobs
    if not gain.token_ids and not result.queried and finish is None:
        return None
    return TokenOutput(
        request_id=sequence.request.request_id,
        choice=sequence.choice,
        token_ids=gain.token_ids,
        scheduled_s=now_s if sequence.scheduled_s is None else sequence.scheduled_s,
        produced_s=now_s,
        logprobs=logprobs if len(logprobs) <= num_tokens else logprobs[:num_tokens],
        prompt_logprobs=result.queried,
        finish_reason=finish,
        stop_token_id=gain.stop_token_id,
        num_cached_tokens=sequence.num_cached_tokens,
        snapshots=sequence.snapshots,
        pooled=None if finish is None or result.pooled is None else tuple(result.pooled.tolist()),
    )


def plain_output(
    sequence: Sequence, token_ids: tuple[int, ...], now_s: float, logprobs: ListOf[TokenLogprobs] = ()
) -> TokenOutput:
    """The output of a step that gave a sequence tokens, maybe their log-probabilities, and nothing else."""
    started_s = now_s if sequence.scheduled_s is None else sequence.scheduled_s
    output = TokenOutput(sequence.request.request_id, sequence.choice, token_ids, started_s, now_s, logprobs)
    output.num_cached_tokens, output.snapshots = sequence.num_cached_tokens, sequence.snapshots
    return output


def failed_output(sequence: Sequence, error: RowError, now_s: float) -> TokenOutput:
    """The last output of a request that can't go on because of one of its sequences."""
    started_s = now_s if sequence.scheduled_s is None else sequence.scheduled_s
    name, choice = sequence.request.request_id, sequence.choice
    return TokenOutput(name, choice, (), started_s, now_s, error=error)
