"""Requests of Ollama's `/api/chat` and `/api/generate`, read as a `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realizar.server.api import Api
from realizar.server.errors import refused, unsupported
from realizar.server.generation.chat_plan import reasons
from realizar.server.generation.conversation import Conversation, can_continue
from realizar.server.generation.tools import ToolPlan, check_functions, check_num_tools
from realizar.server.http.unknown_fields import known_only
from realizar.server.ollama.messages import read_messages
from realizar.server.ollama.options import OPTION_NAMES, read_options
from realizar.server.ollama.records import AnswerRequest, ChatRequest, GenerateRequest
from realizar.tokenizer.parsers.choose import find_format

_EFFORTS = ("low", "medium", "high", "max")


def read_chat(api: Api, request: ChatRequest) -> Conversation:
    """Check a request of `/api/chat` and read it.

    Raises:
        ApiError, InvalidRequestError: the request is refused; names the field.
    """
    check_answer_fields(request)
    tools = _read_tools(request.tools)
    return _conversation(api, request, read_messages(request.messages or []), tools, OPTION_NAMES)


def read_generate(api: Api, request: GenerateRequest) -> Conversation:
    """Read a request of `/api/generate`, whose fields were checked, as the user's message after its system prompt.

    Raises:
        ApiError, InvalidRequestError: the request is refused; names the field.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": request.prompt})
    return _conversation(api, request, messages, ToolPlan(), {**OPTION_NAMES, "messages": "prompt"})


def _conversation(
    api: Api,
    request: AnswerRequest,
    messages: Sequence[dict[str, Any]],
    tools: ToolPlan,
    names: Mapping[str, str],
) -> Conversation:
    return Conversation(
        messages=messages,
        tools=tools,
        wishes=read_options(api, request),
        variables=_thinking_variables(api, request),
        reasoning_effort=request.think if isinstance(request.think, str) else None,
        continues=can_continue(messages[-1]),
        bounded_by_context=True,
        names=names,
    )


def _thinking_variables(api: Api, request: AnswerRequest) -> dict[str, Any]:
    """Variables for the template that turn reasoning on or off. A template without them has no such switch.

    Raises:
        ApiError: 400; the model does not reason, or `think` is no effort.
    """
    think = request.think
    if isinstance(think, str) and think not in _EFFORTS:
        raise refused(f"think must be true, false or one of {', '.join(_EFFORTS)}", "think", "invalid_value")
    if think and not thinks(api):
        raise unsupported("think", f"must be false: {api.model.name!a} does not support thinking")
    return {"enable_thinking": think} if isinstance(think, bool) else {}


def thinks(api: Api) -> bool:
    """True if answers of a model may have reasoning."""
    template = api.model.template
    return template is not None and reasons(find_format(template.source()))


def shows_thinking(request: AnswerRequest) -> bool:
    """True if reasoning is part of the answer."""
    return request.think is not False


def check_answer_fields(request: AnswerRequest) -> None:
    """Refuse fields whose effect the server does not have.

    Raises:
        ApiError: 400; names the field.
    """
    if request.template:
        raise unsupported("template", "is not supported: the server renders the model's own template")


_KNOWN = ("type", "function")
_OF_FUNCTION = ("name", "description", "parameters", "strict")


def _read_tools(given: Sequence[dict[str, Any]] | None) -> ToolPlan:
    """Make the plan from a request's `tools`.

    Raises:
        ApiError: 400; `param` is the path.
    """
    given = given or ()
    check_num_tools(given)
    tools = tuple(_converted(f"tools[{place}]", tool) for place, tool in enumerate(given))
    check_functions(tools, "tools[{}].function.name".format, "tools[{}].function.parameters".format)
    return ToolPlan(tools)


def _converted(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "function"):
        raise unsupported(f"{where}.type", "must be 'function': other tools are not supported")
    known_only(where, tool, _KNOWN)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refused(f"{where}.function must be an object", f"{where}.function")
    where = f"{where}.function"
    function = {key: value for key, value in function.items() if value is not None}
    known_only(where, function, _OF_FUNCTION)
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str):
        raise refused(f"{where}.name must be text", f"{where}.name")
    if not isinstance(description, str | None):
        raise refused(f"{where}.description must be text", f"{where}.description")
    if not isinstance(parameters, dict | None):
        raise refused(f"{where}.parameters must be an object", f"{where}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise refused(f"{where}.strict must be true or false", f"{where}.strict")
    return {"type": "function", "function": function}
