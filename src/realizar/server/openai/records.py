"""Records of OpenAI's API: bodies of requests, and answers. Fields that the API lacks have vLLM's or Jina's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from realizar.sampling_params import SAMPLERS
from realizar.server.generation.answer import FinishReason
from realizar.server.generation.objects import Neutral, table_record
from realizar.server.generation.prompt_read import PromptRead

_EMPTY: tuple[Any, ...] = ([], {}, "")

NEUTRAL: Neutral = {
    "allowed_token_ids": (_EMPTY, "is not supported; use logit_bias or structured outputs"),
    "bad_words": (_EMPTY, "is not supported; use logit_bias"),
    "include_stop_str_in_output": ((False,), "is not supported: stop strings are never part of the text"),
    "kv_transfer_params": (_EMPTY, "is not supported"),
    "length_penalty": ((1, 1.0), "is not supported: there is no beam search"),
    "logits_processors": (_EMPTY, "is not supported"),
    "skip_special_tokens": ((True,), "must be true: control tokens are never part of the text"),
    "spaces_between_special_tokens": ((True, False), "must be true or false"),
    "use_beam_search": ((False,), "must be false: beam search is not supported"),
    "vllm_xargs": (_EMPTY, "is not supported"),
}
"""Fields without effect of both kinds of generation, beside `CHAT_NEUTRAL` of chats alone."""
CHAT_NEUTRAL: Neutral = {
    "audio": ((), "output is not supported"),
    "function_call": (("none", "auto"), "is deprecated; use tool_choice"),
    "functions": (_EMPTY, "is deprecated; use tools"),
    "modalities": ((["text"], []), "must be ['text']: the model answers in text only"),
    "moderation": ((), "is not supported"),
    "store": ((False,), "is not supported: the server stores no answers"),
    "verbosity": (("medium",), "is not supported by this model"),
    "service_tier": (("auto", "default"), "must be auto or default: the server has one tier"),
    "web_search_options": ((), "is not supported: there is no web search"),
}


if TYPE_CHECKING:
    TableFields: TypeAlias = msgspec.Struct
else:
    _KINDS = {each.name: each.kind | None for each in SAMPLERS} | dict.fromkeys(NEUTRAL, Any)
    TableFields = table_record("TableFields", _KINDS)


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


class GenerationFields(TableFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of generation. None means not given; those of `SAMPLERS` and `NEUTRAL` are fields too.

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


# Records of answers: OpenAI's objects, with the order of fields and the nulls that its clients expect.
#
# Log-probabilities are JSON already (`server.openai.logprobs`).


class FunctionCall(msgspec.Struct):
    """A called function; in a stream, a delta of one."""

    name: str | UnsetType
    arguments: str


class ToolCall(msgspec.Struct):
    """A call, or a delta of one, which has an `index`; only a call's first delta has `id` and `type`."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The message of one choice, or the fields of it that a delta adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    """One finished choice with its `message`, or what one gained, its `delta`."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    finish_reason: FinishReason | None = None
    logprobs: msgspec.Raw | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """An answer or a chunk. A chunk's `usage` is null except in the last chunk, if it was asked for.

    `timings` are llama.cpp's, with its names; beside usage, where drafts were verified.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: dict[str, Any] | UnsetType | None = UNSET
    prompt_logprobs: Any | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_progress: PromptRead | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One choice, or a delta of it."""

    index: int
    text: str
    logprobs: msgspec.Raw | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: Any | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


# The record of `/v1/chat/completions`: every field of OpenAI's API, and those of vLLM's and llama.cpp's that apply.


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; the only type is `function`."""

    type: str
    function: FunctionDefinition | None = None
    custom: Any = None
    cache_control: dict[str, Any] | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of `response_format`."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer: `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


if TYPE_CHECKING:
    ChatFields: TypeAlias = GenerationFields
else:
    ChatFields = table_record("ChatFields", dict.fromkeys(CHAT_NEUTRAL, Any), GenerationFields)


class ChatCompletionRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. The contents of `messages`, `tools` and `tool_choice` are checked later, at their use."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


# The record of `/v1/completions`.


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. `prompt` is a text, token ids, or a list of either; null starts from nothing but BOS.

    With `suffix` the answer fills in what lies between the prompt and the suffix.
    """

    prompt: str | list[str | int | list[int]] | None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    suffix: str | None = None


# The record of `/v1/embeddings`.


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. `input` is a text, token ids, or a list of either."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None


# Records of `/v1/rerank` and `/v1/score`, with vLLM's and Jina's names.


class Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to order documents. Results have their texts unless `return_documents` is false.

    Attributes:
        top_n: number of results; null and 0, vLLM's default, are all.
    """

    model: str | None = None
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    user: str | None = None


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for scores of pairs. One `text_1` is paired with each `text_2`."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    user: str | None = None


# The records of `/tokenize` and `/detokenize`, with vLLM's field names, which lm-eval uses.


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None
