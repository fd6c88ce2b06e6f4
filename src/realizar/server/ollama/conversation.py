"""Requests of Ollama's `/api/chat` and `/api/generate`, read as a `Conversation`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from realizar.sampling_params import SAMPLERS, SamplingParams, StructuredOutput
from realizar.server.api import Api
from realizar.server.errors import refused, unsupported
from realizar.server.generation.chat_plan import reasons
from realizar.server.generation.conversation import Conversation, can_continue, log_once, parts_of
from realizar.server.generation.objects import check_fields, checked, text_in
from realizar.server.generation.sampling import SamplingWishes, listed_logprobs
from realizar.server.generation.tools import ToolPlan, read_functions
from realizar.server.http.unknown_fields import known_only
from realizar.server.ollama.messages import read_messages
from realizar.server.ollama.records import AnswerRequest, ChatRequest, GenerateRequest, Options
from realizar.tokenizer.parsers.choose import find_format

_EFFORTS = ("low", "medium", "high", "max")


def read_chat(api: Api, request: ChatRequest) -> Conversation:
    """Check a request of `/api/chat` and read it; ApiError or InvalidRequestError where it is refused."""
    tools = ToolPlan(read_functions(request.tools, "tools[{}]", _converted))
    return _conversation(api, request, read_messages(request.messages or []), tools, OPTION_NAMES)


def read_generate(api: Api, request: GenerateRequest, images: Sequence[dict[str, Any]]) -> Conversation:
    """Read a request of `/api/generate`, whose fields were checked, as the user's message after its system prompt.

    `images` are its own, as parts of a content.

    Raises as `read_chat` does.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}] if request.system else []
    content = [*images, *parts_of(request.prompt)] if images else request.prompt
    messages.append({"role": "user", "content": content})
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

    Raises ApiError: 400; the model does not reason, or `think` is no effort.
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
    return request.think is not False


_KNOWN = ("type", "function")
_OF_FUNCTION = {"name": str, "description": str, "parameters": dict, "strict": bool}


def _converted(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "function"):
        raise unsupported(f"{where}.type", "must be 'function': other tools are not supported")
    known_only(where, tool, _KNOWN)
    where = f"{where}.function"
    given = checked(where, tool.get("function"), dict)
    function = {key: value for key, value in given.items() if value is not None}
    check_fields(where, function, _OF_FUNCTION, _OF_FUNCTION)
    text_in(where, function, "name", may_be_empty=True)
    return {"type": "function", "function": function}


# `read_options` reads Ollama's `options`, and the fields beside them that bear on sampling, as `SamplingWishes`.

_LOG = logging.getLogger(__name__)
_PLAIN = {each.ollama: each.name for each in SAMPLERS if each.ollama} | {"seed": "seed"}
"""Fields of `SamplingParams` by the names of the options that set them."""
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_WHOLE_CONTEXT = (0, -1, -2)
_USUAL_REACH = 64
"""Ollama's default of `repeat_last_n`. Clients that send all options send it; it changes as little as its absence."""

OPTION_NAMES = {ours: f"options.{theirs}" for theirs, ours in _PLAIN.items()} | {
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "structured": "format",
    "reasoning_effort": "think",
}
"""Ollama's names of the fields that errors name."""


def read_options(api: Api, request: AnswerRequest) -> SamplingWishes:
    """Check the options of a request and read them.

    Raises ApiError or InvalidRequestError: 400; `param` is the path.
    """
    if request.template:
        raise unsupported("template", "is not supported: the server renders the model's own template")
    given = request.options or Options()
    plain: dict[str, Any] = {
        ours: value for theirs, ours in _PLAIN.items() if (value := getattr(given, theirs)) is not None
    }
    if plain.get("top_p") == 0:  # of Ollama's tokens the most probable one is left then
        del plain["top_p"]
        plain["top_k"] = 1
    if plain.get("seed") == -1:
        plain["seed"] = None
    _check_penalties(given, plain, api.model.default_sampling, api.max_tokens)
    if given.num_predict is not None:
        plain["max_tokens"] = _max_tokens(given.num_predict)
    if given.tfs_z not in (None, 1):
        raise unsupported("options.tfs_z", "must be 1, which turns it off: tail-free sampling is not supported")
    return SamplingWishes(
        plain=plain,
        stop=given.stop or None,
        logprobs=listed_logprobs(request.top_logprobs, wanted=request.logprobs),
        structured=read_format(request.format),
    )


def read_format(given: str | dict[str, Any] | None) -> StructuredOutput | None:
    """The constraint that `format` states, None if the answer is free. Raises ApiError: 400; it is no format."""
    if given is None or given == "":
        return None
    if given == "json":
        return StructuredOutput("json_object", "")
    if isinstance(given, str):
        raise refused("format must be json or a JSON schema", "format", "invalid_value")
    return StructuredOutput("json_schema", json.dumps(given))


def _max_tokens(given: int) -> int | None:
    if given in _WHOLE_CONTEXT:
        return None
    if given < 1:
        raise refused(f"options.num_predict must be -2 or more, not {given}", "options.num_predict")
    return given


def _check_penalties(given: Options, plain: dict[str, Any], default: SamplingParams, max_tokens: int) -> None:
    """Penalties look back at the whole text, `max_tokens`: shorter reaches are refused where a penalty is at work."""
    reach = given.repeat_last_n
    if reach is not None and reach < -1:
        raise refused(f"options.repeat_last_n must be -1 or more, not {reach}", "options.repeat_last_n")
    if reach == 0:
        plain.update(_PENALTIES)
    active = any(plain.get(name, getattr(default, name)) != neutral for name, neutral in _PENALTIES.items())
    if active and reach == _USUAL_REACH:
        reach_note = "penalties look back at the whole text, also where options.repeat_last_n is %d"
        log_once(_LOG, reach_note, _USUAL_REACH)
    elif active and reach is not None and reach != -1 and reach < max_tokens:
        raise unsupported(
            "options.repeat_last_n",
            f"must be -1, the whole text, 0, or {_USUAL_REACH}, Ollama's default: penalties look back at all tokens",
        )
    if active and given.penalize_newline is False:
        raise unsupported("options.penalize_newline", "must be true: penalties count line breaks as they do other text")
