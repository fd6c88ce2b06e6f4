"""`read_conversation` reads a chat request of OpenAI's API as a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from realizar.images.given import GivenImage
from realizar.images.prepare import read_bounds
from realizar.sampling_params import StructuredOutput
from realizar.server.errors import refused, unsupported
from realizar.server.generation.chat_plan import template_variables
from realizar.server.generation.conversation import (
    Conversation,
    can_continue,
    check_num_messages,
    image_part,
    wants_low,
)
from realizar.server.generation.objects import check_fields, check_neutral, checked
from realizar.server.generation.prompt_read import check_progress
from realizar.server.generation.sampling import SamplingWishes, check_top, listed_logprobs
from realizar.server.generation.tools import (
    ToolPlan,
    plan_allowed,
    plan_mode,
    read_functions,
)
from realizar.server.http.unknown_fields import known_only
from realizar.server.openai.fields import check_stream, find_structured, read_wishes
from realizar.server.openai.records import (
    CHAT_NEUTRAL,
    NEUTRAL,
    ChatCompletionRequest,
    FunctionDefinition,
    TokenizeRequest,
    Tool,
)

# Checks of a conversation's messages, field by field; errors name the path of the field.

_EVERYWHERE = ("role", "content", "name", "cache_control")
_REPEATED = ("parsed", "provider_specific_fields", "reasoning_details", "reasoning_items", "thinking_blocks")
"""What clients add to an assistant's message of what it says already, and send back: OpenAI's helpers, litellm."""
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "system": _EVERYWHERE,
    "developer": _EVERYWHERE,
    "user": _EVERYWHERE,
    "tool": (*_EVERYWHERE, "tool_call_id"),
    "assistant": (
        *_EVERYWHERE,
        "tool_calls",
        "reasoning_content",
        "reasoning",
        *("refusal", "audio", "function_call", "annotations", "images"),
        *_REPEATED,
    ),
}
_KINDS: Mapping[str, type] = {
    "cache_control": dict,  # it changes nothing: the prefix cache needs no marks
    **dict.fromkeys(("name", "tool_call_id", "reasoning_content", "reasoning"), str),
}
_OF_CALL = ("id", "type", "function")
_OF_FUNCTION = ("name", "arguments")
_MEDIA = ("input_audio", "file", "input_image", "video_url", "audio_url", "image", "audio")


def check_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and convert them for the template: null fields are dropped, except an assistant's content.

    Raises ApiError: 400; `param` is the path.
    """
    check_num_messages(messages)
    return [_checked(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _checked(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise refused(f"{where}.role: 'function' is deprecated; use 'tool'", f"{where}.role", "invalid_value")
    known = _FIELDS.get(role) if isinstance(role, str) else None
    if known is None:
        expected = ", ".join(_FIELDS)
        raise refused(f"{where}.role must be one of {expected}", f"{where}.role", "invalid_value")
    check_fields(where, message, known, _KINDS, "invalid_value")
    dropped = ("cache_control", *_REPEATED)
    checked = {name: value for name, value in message.items() if value is not None and name not in dropped}
    for name in ("refusal", "audio", "function_call", "annotations", "images"):
        _require(not checked.pop(name, None), f"{where}.{name}", "is not supported")
    if "reasoning" in checked:
        checked.setdefault("reasoning_content", checked.pop("reasoning"))
    calls = checked.get("tool_calls")
    if calls is not None:
        path = f"{where}.tool_calls"
        _require(isinstance(calls, list), path, "must be a list")
        checked["tool_calls"] = calls = [_checked_call(f"{path}[{place}]", call) for place, call in enumerate(calls)]
        if not calls:
            del checked["tool_calls"]
    _require(role != "tool" or bool(checked.get("tool_call_id")), f"{where}.tool_call_id", "is missing")
    if "content" in checked:
        checked["content"] = content = _checked_content(f"{where}.content", checked["content"])
        sees = role in ("user", "tool") or not any("image" in part for part in content)
        _require(sees, f"{where}.content", "has images, which only messages of users and tools may have")
    else:
        reasoned = "reasoning_content" in checked
        _require(bool(calls) or reasoned, f"{where}.content", "is missing")
        checked["content"] = None if calls else ""  # templates join a message's text to others
    return checked


def _checked_content(where: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    _require(isinstance(content, list), where, "must be text or a list of parts")
    _require(bool(content), where, "must not be empty")
    return [_checked_part(f"{where}[{place}]", part) for place, part in enumerate(content)]


def _checked_part(path: str, part: Any) -> dict[str, Any]:
    _require(isinstance(part, dict), path, "must be an object")
    kind = part.get("type")
    if kind in _MEDIA:
        message = f"{path}: parts of type '{kind}' are not supported: models read text, and images as 'image_url'"
        raise refused(message, f"{path}.type", "unsupported_content")
    if kind == "image_url":
        return image_part(_checked_image(path, part))
    _require(kind == "text", f"{path}.type", "must be 'text' or 'image_url'")
    _require(isinstance(part.get("text"), str), f"{path}.text", "must be text")
    check_fields(path, part, ("type", "text", "prompt_cache_breakpoint", "cache_control"), _KINDS, "invalid_value")
    return {"type": "text", "text": part["text"]}


def _checked_image(path: str, part: dict[str, Any]) -> GivenImage:
    known_only(path, part, ("type", "image_url", "prompt_cache_breakpoint", "cache_control"))
    given = checked(f"{path}.image_url", part.get("image_url"), dict, "invalid_value")
    known_only(f"{path}.image_url", given, ("url", "detail"))
    url = given.get("url")
    _require(isinstance(url, str), f"{path}.image_url.url", "must be text")
    return GivenImage(f"{path}.image_url", url=url, low=wants_low(f"{path}.image_url.detail", given.get("detail")))


def _checked_call(path: str, call: Any) -> dict[str, Any]:
    _require(isinstance(call, dict), path, "must be an object")
    _require(call.get("type", "function") == "function", f"{path}.type", "must be 'function'")
    known_only(path, call, (*_OF_CALL, "index", "provider_specific_fields"))
    _require(isinstance(call.get("id", ""), str), f"{path}.id", "must be text")
    function = call.get("function")
    _require(isinstance(function, dict), f"{path}.function", "must be an object")
    known_only(f"{path}.function", function, (*_OF_FUNCTION, "parsed_arguments", "provider_specific_fields"))
    name, arguments = function.get("name"), function.get("arguments", "")
    _require(isinstance(name, str) and bool(name), f"{path}.function.name", "must be text")
    _require(isinstance(arguments, str | dict), f"{path}.function.arguments", "must be JSON text")
    kept = {name: call[name] for name in _OF_CALL if name in call}
    return {**kept, "function": {name: function[name] for name in _OF_FUNCTION if name in function}}


def _require(holds: bool, path: str, what: str) -> None:
    if not holds:
        raise refused(f"{path} {what}", path, "invalid_value")


# Tools of a chat request, and `tool_choice`, read as a `ToolPlan`.


def check_tools(given: Sequence[Tool] | None) -> tuple[Mapping[str, Any], ...]:
    """Check the tools of a request and convert them for the template; raises as `check_messages` does."""
    return read_functions(given, "tools[{}]", _converted)


def _converted(path: str, tool: Tool) -> dict[str, Any]:
    if tool.type != "function" or tool.custom is not None:
        raise unsupported(f"{path}.type", "must be 'function': other tools are not supported")
    if tool.function is None:
        raise refused(f"{path}.function is missing", f"{path}.function", "missing_required_parameter")
    given = msgspec.to_builtins(tool.function).items()
    function = {name: value for name, value in given if value is not None and name != "cache_control"}
    return {"type": tool.type, "function": function}


def plan_tools(request: ChatCompletionRequest) -> ToolPlan:
    """From a request's `tools`, `tool_choice` and `parallel_tool_calls`; raises as `check_messages` does."""
    tools = check_tools(request.tools)
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return plan_mode(tools, choice, parallel=parallel)
    if choice.get("type") == "function":
        return ToolPlan(tools, name=_named(tools, choice, "tool_choice", ("name",)), parallel=False)
    if choice.get("type") != "allowed_tools":
        raise refused("tool_choice.type must be function or allowed_tools", "tool_choice.type", "invalid_value")
    known_only("tool_choice", choice, ("type", "allowed_tools"))
    path = "tool_choice.allowed_tools"
    allowed = checked(path, choice.get("allowed_tools"), dict, "invalid_value")
    known_only(path, allowed, ("mode", "tools"))
    fields = FunctionDefinition.__struct_fields__  # a tool may be named by its whole definition
    return plan_allowed(tools, path, allowed, lambda each, at: _named(tools, each, at, fields), parallel=parallel)


def _named(tools: Sequence[Mapping[str, Any]], choice: Any, path: str, known: tuple[str, ...]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise refused(f"{path}.function.name is missing", f"{path}.function.name", "missing_required_parameter")
    known_only(path, choice, ("type", "function"))
    known_only(f"{path}.function", function, known)
    if name not in (tool["function"]["name"] for tool in tools):
        reason = f"{path} names the tool {name[:80]!a}, which is not in tools"
        raise refused(reason, f"{path}.function.name", "invalid_value")
    return name


def read_conversation(request: ChatCompletionRequest) -> Conversation:
    """Check the fields of a request that no other dialect has, and read the others.

    Raises ApiError or InvalidRequestError, naming the field, where the request is refused.
    """
    check_neutral(request, {**NEUTRAL, **CHAT_NEUTRAL})
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
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        prediction=_predicted(request.prediction),
        reports_progress=check_progress(request.return_progress, stream=request.stream),
        image_bounds=read_bounds(request.mm_processor_kwargs),
        names=names,
    )


def _predicted(prediction: dict[str, Any] | None) -> str:
    """The text of a prediction, which is one or several parts."""
    if prediction is None:
        return ""
    _require(prediction.get("type") == "content", "prediction.type", "must be 'content'")
    known_only("prediction", prediction, ("type", "content"))
    content = _checked_content("prediction.content", prediction.get("content"))
    for place, part in enumerate(content):
        _require(isinstance(part, str) or "text" in part, f"prediction.content[{place}]", "must be text")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def continues_last(request: ChatCompletionRequest | TokenizeRequest, last: dict[str, Any]) -> bool:
    """True if the prompt ends within the last message, which must be an assistant's with text and without calls.

    Raises ApiError: 400; it is no such message.
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
    logprobs = listed_logprobs(request.top_logprobs, wanted=request.logprobs)
    check_stream(request)
    wins = request.max_completion_tokens is not None
    return read_wishes(
        request,
        max_tokens=request.max_completion_tokens if wins else request.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=check_top(request.prompt_logprobs, "prompt_logprobs"),
        structured=structured,
    )
