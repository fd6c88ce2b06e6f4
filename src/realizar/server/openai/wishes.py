"""`read_wishes` reads the sampling fields that OpenAI's API and vLLM's share between both kinds of generation."""

from __future__ import annotations

from realizar.sampling_params import StructuredOutput
from realizar.server.errors import unsupported
from realizar.server.generation.sampling import PLAIN_FIELDS, SamplingWishes
from realizar.server.openai.records import GenerationFields


def read_wishes(
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: StructuredOutput | None,
) -> SamplingWishes:
    """Read the sampling fields of a request.

    Args:
        max_tokens: None is the model's default.

    Raises:
        ApiError: 400; `best_of` asks for answers that are thrown away.
    """
    if fields.best_of is not None and fields.best_of != (1 if fields.n is None else fields.n):
        raise unsupported("best_of", "must equal n: no further answers are generated")
    plain = {name: value for name in PLAIN_FIELDS if (value := getattr(fields, name)) is not None}
    return SamplingWishes(
        plain=plain if max_tokens is None else {**plain, "max_tokens": max_tokens},
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        logit_bias=fields.logit_bias,
        dry_sequence_breakers=fields.dry_sequence_breakers,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured,
    )
