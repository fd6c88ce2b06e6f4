"""`read_conversation` reads a chat request of OpenAI's API as a `Conversation`."""

from __future__ import annotations

from typing import Any

from realizar.sampling_params import StructuredOutput
from realizar.server.errors import refused, unsupported
from realizar.server.generation.chat_plan import template_variables
from realizar.server.generation.conversation import Conversation, can_continue
from realizar.server.generation.prompt_read import check_progress
from realizar.server.generation.sampling import SamplingWishes, check_top
from realizar.server.openai.messages import check_messages
from realizar.server.openai.neutral import check_neutral
from realizar.server.openai.records import ChatCompletionRequest, TokenizeRequest
from realizar.server.openai.structured import find_structured
from realizar.server.openai.tools import plan_tools
from realizar.server.openai.wishes import read_wishes


def read_conversation(request: ChatCompletionRequest) -> Conversation:
    """Check the fields of a request that no other dialect has, and read the others.

    Raises:
        ApiError, InvalidRequestError: the request is refused; names the field.
    """
    check_neutral(request)
    tools = plan_tools(request)
    found = find_structured(request, request.response_format)
    messages = check_messages(request.messages)
    wishes = _wishes(request, None if found is None else found[1])
    names = {} if found is None else {"structured": found[0]}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if request.add_special_tokens:
        raise unsupported("add_special_tokens", "must be false: the chat template writes special tokens")
    return Conversation(
        messages=messages,
        tools=tools,
        wishes=wishes,
        variables=template_variables(request.chat_template_kwargs),
        documents=request.documents,
        reasoning_effort=request.reasoning_effort,
        template=request.chat_template,
        add_prompt=request.add_generation_prompt is not False,
        continues=continues_last(request, messages[-1]),
        keep_last=request.truncate_prompt_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt,
        reports_progress=check_progress(request.return_progress, stream=request.stream),
        names=names,
    )


def continues_last(request: ChatCompletionRequest | TokenizeRequest, last: dict[str, Any]) -> bool:
    """True if the prompt ends within the last message, which must be an assistant's with text and without calls.

    Raises:
        ApiError: 400; it is no such message.
    """
    if not request.continue_final_message:
        return False
    if request.add_generation_prompt:
        raise refused("continue_final_message needs add_generation_prompt to be false", "continue_final_message")
    if not can_continue(last):
        reason = "continue_final_message needs a last message of the assistant's that has text and calls no tool"
        raise refused(reason, "continue_final_message")
    return True


def _wishes(request: ChatCompletionRequest, structured: StructuredOutput | None) -> SamplingWishes:
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options needs stream to be true", "stream_options", "invalid_value")
    if request.stream and request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "can't be combined with stream")
    top = check_top(request.top_logprobs, "top_logprobs") or 0
    wins = request.max_completion_tokens is not None
    return read_wishes(
        request,
        max_tokens=request.max_completion_tokens if wins else request.max_tokens,
        logprobs=top if request.logprobs else None,
        prompt_logprobs=check_top(request.prompt_logprobs, "prompt_logprobs"),
        structured=structured,
    )
