"""`read_conversation` reads a request of the Responses API as a `Conversation`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realizar.sampling_params import StructuredOutput
from realizar.server.errors import refused, unsupported
from realizar.server.generation.conversation import Conversation, check_num_messages
from realizar.server.generation.prompt_read import check_progress
from realizar.server.generation.sampling import SamplingWishes, check_top
from realizar.server.responses.input_items import ItemReader
from realizar.server.responses.records import InputTokensRequest, ResponsesRequest
from realizar.server.responses.tools import ResponseTools

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_WITHOUT_EFFECT = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""Values of `include` about items that no answer has here."""
_INCLUDABLE = (LOGPROBS, ENCRYPTED, *_WITHOUT_EFFECT)
_PLAIN = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_MAX_METADATA = 16
_MAX_METADATA_KEY, _MAX_METADATA_VALUE = 64, 512

_Check = Callable[[Any], bool]
_NEUTRAL: Mapping[str, tuple[_Check, str]] = {
    "access_programs": (lambda value: False, "is not supported"),
    "background": (lambda value: value is False, "must be false: answers are made while the client waits"),
    "background_options": (lambda value: False, "is not supported: answers are made while the client waits"),
    "context_management": (lambda value: value == [], "is not supported: the server edits no conversation"),
    "conversation": (lambda value: False, "is not supported; send the items in input"),
    "image": (lambda value: False, "is not supported: the model reads text only"),
    "moderation": (lambda value: False, "is not supported"),
    "prompt": (lambda value: False, "is not supported: the server keeps no prompt templates"),
    "service_tier": (lambda value: value in ("auto", "default"), "must be auto or default: the server has one tier"),
}
"""Fields that have no effect here: the check of a value that is accepted, and why others are not."""


def read_conversation(
    request: InputTokensRequest, tools: ResponseTools, earlier: Sequence[dict[str, Any]] = ()
) -> Conversation:
    """Check a request and read it. A count of tokens is read like a request for the shortest answer.

    Args:
        earlier: items of the responses before it.

    Raises:
        ApiError, InvalidRequestError: the request is refused; names the field.
    """
    _check_without_effect(request)
    structured = _structured(request)
    return Conversation(
        messages=_messages(request, earlier),
        tools=tools.plan,
        wishes=_wishes(request, structured),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        bounded_by_context=True,
        drops_oldest=request.truncation == "auto",
        reports_progress=isinstance(request, ResponsesRequest)
        and check_progress(request.return_progress, stream=request.stream),
        names={
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
            "structured": "text.format",
        },
    )


def includes(request: ResponsesRequest, name: str) -> bool:
    """True if a request's `include` has a value."""
    return name in (request.include or ())


def check_include(values: Sequence[str]) -> None:
    """Check the values of `include`.

    Raises:
        ApiError: 400; one is not known.
    """
    for place, value in enumerate(values):
        if value not in _INCLUDABLE:
            path = f"include[{place}]"
            raise refused(f"{path} must be one of {', '.join(_INCLUDABLE)}", path, "invalid_value")


def shows_summary(request: InputTokensRequest) -> bool:
    """True if reasoning is wanted as a summary. The model makes none, so its reasoning stands there."""
    reasoning = request.reasoning
    return reasoning is not None and (reasoning.summary or reasoning.generate_summary) is not None


def _messages(request: InputTokensRequest, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    given = request.input
    if given is None:
        raise refused("Missing required parameter: 'input'", "input", "missing_required_parameter")
    reader = ItemReader()
    if request.instructions:
        reader.add_text("system", request.instructions)
    if isinstance(given, list):
        check_num_messages([*earlier, *given], "input")
    for item in earlier:
        reader.read("previous_response_id", item)
    if isinstance(given, str):
        reader.add_text("user", given)
    else:
        for place, item in enumerate(given):
            reader.read(f"input[{place}]", item)
    messages = reader.messages()
    if not messages:
        raise refused("input has no message", "input")
    return messages


def _wishes(request: InputTokensRequest, structured: StructuredOutput | None) -> SamplingWishes:
    if not isinstance(request, ResponsesRequest):
        # The room for an answer decides what is dropped: a count of what remains is that of an answer of any length.
        return SamplingWishes(plain={} if request.truncation == "auto" else {"max_tokens": 1}, structured=structured)
    wanted = includes(request, LOGPROBS)
    if request.top_logprobs and not wanted:
        raise refused(f"top_logprobs needs include to have {LOGPROBS}", "top_logprobs", "invalid_value")
    top = check_top(request.top_logprobs, "top_logprobs") or 0
    plain = {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        plain["max_tokens"] = request.max_output_tokens
    return SamplingWishes(plain=plain, logprobs=top if wanted else None, structured=structured)


def _structured(request: InputTokensRequest) -> StructuredOutput | None:
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutput("json_object", "")
    for name in ("name", "schema"):
        if getattr(form, name) is None:
            path = f"text.format.{name}"
            raise refused(f"Missing required parameter: '{path}'", path, "missing_required_parameter")
    return StructuredOutput("json_schema", json.dumps(form.schema))


def _check_without_effect(request: InputTokensRequest) -> None:
    """Refuse fields whose effect the server does not have."""
    for name, (accepts, reason) in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not accepts(value):
            raise unsupported(name, reason)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "must be medium: the model knows no other")
    reasoning = request.reasoning
    if reasoning is not None:
        if reasoning.context not in (None, "auto"):
            raise unsupported("reasoning.context", "must be auto: the model's template decides")
        if reasoning.mode not in (None, "standard"):
            raise unsupported("reasoning.mode", "must be standard: the server has one mode")
    if isinstance(request, ResponsesRequest):
        _check_answer_fields(request)


def _check_answer_fields(request: ResponsesRequest) -> None:
    """Check the fields that a count of tokens does not have."""
    check_include(request.include or ())
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "is not supported: the stream has no padding")
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise refused("max_tool_calls must be at least 1", "max_tool_calls", "invalid_value")
    _check_metadata(request.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise refused(f"metadata has {len(metadata)} keys; at most {_MAX_METADATA} are allowed", "metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
            raise refused(
                f"metadata may have keys of {_MAX_METADATA_KEY} and values of {_MAX_METADATA_VALUE} characters at most",
                "metadata",
                "string_too_long",
            )
