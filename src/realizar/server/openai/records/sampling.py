"""Fields of both chat and completion requests. Fields that OpenAI's API lacks have vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from realizar.sampling_params import SAMPLERS

if TYPE_CHECKING:
    SamplerFields: TypeAlias = msgspec.Struct
else:
    SamplerFields = msgspec.defstruct(
        "SamplerFields", [(each.name, each.kind | None, None) for each in SAMPLERS], kw_only=True,
        forbid_unknown_fields=True,
    )  # fmt: skip


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`include_usage` adds a last chunk with the usage; obfuscation is padding, which is refused.

    `continuous_usage_stats` adds it to all chunks, and has no effect without `include_usage`.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields for constrained output; at most one is given."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationFields(SamplerFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of generation. None means not given; fields typed Any are checked in `neutral.py`.

    `model` may be omitted, as a server has one model.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    return_progress: bool | None = None

    dry_sequence_breakers: list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

    allowed_token_ids: Any = None
    bad_words: Any = None
    include_stop_str_in_output: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
