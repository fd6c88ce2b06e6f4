"""`read_conversation` reads a request of the Responses API as a `Conversation`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realizar.images.given import GivenImage
from realizar.sampling_params import StructuredOutput
from realizar.server.errors import refused, unsupported
from realizar.server.generation.conversation import (
    Conversation,
    check_num_messages,
    image_part,
    text_part,
    turn,
    wants_low,
)
from realizar.server.generation.objects import Neutral, check_fields, check_neutral, text_in
from realizar.server.generation.prompt_read import check_progress
from realizar.server.generation.sampling import SamplingWishes, listed_logprobs
from realizar.server.responses.reasoning import revealed
from realizar.server.responses.records import InputTokensRequest, ReasoningConfig, ResponsesRequest
from realizar.server.responses.tools import ResponseTools, arguments_of, full_name

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

_NEUTRAL: Neutral = {
    "access_programs": ((), "is not supported"),
    "background": ((False,), "must be false: answers are made while the client waits"),
    "background_options": ((), "is not supported: answers are made while the client waits"),
    "context_management": (([],), "is not supported: the server edits no conversation"),
    "conversation": ((), "is not supported; send the items in input"),
    "image": ((), "is not supported; send images in input"),
    "moderation": ((), "is not supported"),
    "prompt": ((), "is not supported: the server keeps no prompt templates"),
    "service_tier": (("auto", "default"), "must be auto or default: the server has one tier"),
}


def read_conversation(
    request: InputTokensRequest, tools: ResponseTools, earlier: Sequence[dict[str, Any]] = ()
) -> Conversation:
    """Check a request, after the items of the responses before it, and read it.

    A count of tokens is read like a request for the shortest answer. Raises ApiError or InvalidRequestError, naming the
    field, where the request is refused.
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
    return name in (request.include or ())


def check_include(values: Sequence[str]) -> None:
    """Check the values of `include`. Raises ApiError: 400; one is not known."""
    for place, value in enumerate(values):
        if value not in _INCLUDABLE:
            path = f"include[{place}]"
            raise refused(f"{path} must be one of {', '.join(_INCLUDABLE)}", path, "invalid_value")


def shows_summary(request: InputTokensRequest) -> bool:
    """True if reasoning is wanted as a summary. The model makes none, so its reasoning stands there."""
    reasoning = request.reasoning or ReasoningConfig()
    return (reasoning.summary or reasoning.generate_summary) is not None


def _messages(request: InputTokensRequest, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    given = request.input
    if given is None:
        raise refused("Missing required parameter: 'input'", "input", "missing_required_parameter")
    reader = _ItemReader()
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
    wanted, needs = includes(request, LOGPROBS), f"include to have {LOGPROBS}"
    listed = listed_logprobs(request.top_logprobs, wanted=wanted, needs=needs)
    plain = {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        plain["max_tokens"] = request.max_output_tokens
    return SamplingWishes(plain=plain, logprobs=listed, structured=structured)


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
    check_neutral(request, _NEUTRAL)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "must be medium: the model knows no other")
    reasoning = request.reasoning or ReasoningConfig()
    if reasoning.context not in (None, "auto"):
        raise unsupported("reasoning.context", "must be auto: the model's template decides")
    if reasoning.mode not in (None, "standard"):
        raise unsupported("reasoning.mode", "must be standard: the server has one mode")
    if isinstance(request, ResponsesRequest):
        _check_answer_fields(request)


def _check_answer_fields(request: ResponsesRequest) -> None:
    check_include(request.include or ())
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise refused("max_tool_calls must be at least 1", "max_tool_calls", "invalid_value")
    _check_metadata(request.metadata or {})


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise refused(f"metadata has {len(metadata)} keys; at most {_MAX_METADATA} are allowed", "metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
            sizes = f"keys of {_MAX_METADATA_KEY} and values of {_MAX_METADATA_VALUE} characters"
            raise refused(f"metadata may have {sizes} at most", "metadata", "string_too_long")


# Items of a request's `input`, converted to the messages that chat templates take.
#
# Several items may be one message: reasoning, text and calls of the model that follow one another, and texts of one
# role.

_COMMON = ("type", "id", "status")
_PARSED = ("parsed_arguments", "parsed")  # openai's `parse` adds them to what it gives, and LangChain sends them back
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": (*_COMMON, "role", "content", "phase"),
    "function_call": (*_COMMON, "call_id", "name", "arguments", "namespace", "caller", "async", "created_by", *_PARSED),
    "function_call_output": (*_COMMON, "call_id", "output", "caller", "name", "namespace", "created_by"),
    "custom_tool_call": (*_COMMON, "call_id", "name", "input", "namespace", "caller", "async", "created_by"),
    "custom_tool_call_output": (*_COMMON, "call_id", "output", "caller", "name", "namespace", "created_by"),
    "reasoning": (*_COMMON, "summary", "content", "encrypted_content"),
}
_PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "input_text": ("text", ("type", "text", "prompt_cache_breakpoint")),
    "output_text": ("text", ("type", "text", "annotations", "logprobs", *_PARSED)),
    "refusal": ("refusal", ("type", "refusal")),
    "summary_text": ("text", ("type", "text")),
    "reasoning_text": ("text", ("type", "text")),
    "text": ("text", ("type", "text")),
}
"""Types of parts: the field of the text, and all fields."""
_MEDIA = ("input_file", "input_audio", "input_video", "computer_screenshot")
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("id", "status", "phase", "namespace", "created_by", "name", "encrypted_content"), str),
    **dict.fromkeys(("caller", "prompt_cache_breakpoint"), dict),
    **dict.fromkeys(("annotations", "logprobs"), list),
    "async": bool,
}
"""Kinds of the fields that change no prompt, or may be null."""
_SPOKEN = ("input_text", "output_text", "refusal")
_OF_ROLE = {"assistant": _SPOKEN} | dict.fromkeys(("user", "system", "developer"), ("input_text", "output_text"))


@dataclass(slots=True)
class _Message:
    """A message that grows."""

    role: str
    parts: list[str | GivenImage] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""

    def converted(self) -> dict[str, Any]:
        texts = [part for part in self.parts if isinstance(part, str)]
        if len(texts) < len(self.parts):  # of a user or a tool
            parts = [text_part(part) if isinstance(part, str) else image_part(part) for part in self.parts]
            call = {"tool_call_id": self.call_id} if self.role == "tool" else {}
            return {"role": self.role, **call, "content": parts}
        if self.role == "tool":
            return {"role": "tool", "tool_call_id": self.call_id, "content": "\n".join(texts)}
        return turn(self.role, texts, self.thoughts, self.calls, "\n\n")


class _ItemReader:
    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._calls: dict[str, bool] = {}  # True once a call has its output

    def messages(self) -> list[dict[str, Any]]:
        return [message.converted() for message in self._messages]

    def read(self, where: str, item: dict[str, Any]) -> None:
        """Read the next item, whose path is `where`. Raises ApiError: 400; `param` is the path."""
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _FIELDS:
            known = ", ".join(_FIELDS)
            raise unsupported(f"{where}.type", f"{ascii(kind)[:60]} is not supported: {known} are")
        check_fields(where, item, _FIELDS[kind], _KINDS, "invalid_type")
        match kind:
            case "message":
                self._read_message(where, item)
            case "function_call":
                self._read_call(where, item)
            case "custom_tool_call":
                self._read_custom_call(where, item)
            case "function_call_output" | "custom_tool_call_output":
                self._read_output(where, item)
            case _:
                self._read_reasoning(where, item)

    def add_text(self, role: str, text: str) -> None:
        self._of(role).parts.append(text)

    def _of(self, role: str) -> _Message:
        """The last message if it is of this role, otherwise a new one. System and developer are one role here."""
        if self._messages:
            last = self._messages[-1].role
            if last == role or {last, role} == {"system", "developer"}:
                return self._messages[-1]
        self._messages.append(_Message(role))
        return self._messages[-1]

    def _read_message(self, where: str, item: dict[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or role not in _OF_ROLE:
            raise refused(f"{where}.role must be one of {', '.join(_OF_ROLE)}", f"{where}.role", "invalid_value")
        if isinstance(content, str):
            self.add_text(role, content)
            return
        parts = _parts(f"{where}.content", content, _OF_ROLE[role], images=role == "user")
        if not parts and role != "assistant":
            raise refused(f"{where}.content must not be empty", f"{where}.content", "empty_array")
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            self._of(role).parts += parts
        else:
            self.add_text(role, "".join(texts) if role == "assistant" else "\n".join(texts))

    def _read_call(self, where: str, item: dict[str, Any]) -> None:
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise refused(f"{where}.arguments must be JSON text", f"{where}.arguments")
        self._add_call(where, item, arguments)

    def _read_custom_call(self, where: str, item: dict[str, Any]) -> None:
        self._add_call(where, item, arguments_of(text_in(where, item, "input", may_be_empty=True)))

    def _add_call(self, where: str, item: dict[str, Any], arguments: str) -> None:
        call_id, name = text_in(where, item, "call_id"), text_in(where, item, "name")
        if call_id in self._calls:
            raise refused(f"{where}.call_id is that of an earlier call", f"{where}.call_id", "invalid_value")
        self._calls[call_id] = False
        function = {"name": full_name(item.get("namespace"), name), "arguments": arguments}
        self._of("assistant").calls.append({"id": call_id, "type": "function", "function": function})

    def _read_output(self, where: str, item: dict[str, Any]) -> None:
        call_id, output = text_in(where, item, "call_id"), item.get("output")
        if call_id not in self._calls:
            raise refused(f"{where}.call_id names no earlier call", f"{where}.call_id", "invalid_value")
        if self._calls[call_id]:
            raise refused(f"{where}.call_id names a call that has its output", f"{where}.call_id", "invalid_value")
        self._calls[call_id] = True
        if isinstance(output, str):
            output = [{"type": "input_text", "text": output}]
        parts = _parts(f"{where}.output", output, ("input_text",), images=True)
        self._messages.append(_Message("tool", parts, call_id=call_id))

    def _read_reasoning(self, where: str, item: dict[str, Any]) -> None:
        texts = revealed(item.get("encrypted_content"))
        shown = [
            _texts(f"{where}.{name}", item[name], kinds)
            for name, kinds in (("content", ("reasoning_text", "text")), ("summary", ("summary_text",)))
            if item.get(name) is not None
        ]
        found = [texts] if texts else next(filter(None, shown), [])
        if found:
            self._of("assistant").thoughts += found


def _texts(where: str, parts: Any, kinds: Sequence[str]) -> list[str]:
    if not isinstance(parts, list):
        raise refused(f"{where} must be text or a list of parts", where)
    return [_text(f"{where}[{place}]", part, kinds) for place, part in enumerate(parts)]


def _parts(where: str, parts: Any, kinds: Sequence[str], *, images: bool) -> list[str | GivenImage]:
    """Texts and, where there may be any, images."""
    if not images or not isinstance(parts, list):
        return [*_texts(where, parts, kinds)]
    return [
        _image(f"{where}[{place}]", part)
        if isinstance(part, dict) and part.get("type") == "input_image"
        else _text(f"{where}[{place}]", part, kinds)
        for place, part in enumerate(parts)
    ]


def _image(where: str, part: dict[str, Any]) -> GivenImage:
    known = ("type", "image_url", "detail", "prompt_cache_breakpoint")
    check_fields(where, part, known, {"detail": str, "prompt_cache_breakpoint": dict}, "invalid_type")
    path = f"{where}.image_url"
    url = part.get("image_url")
    if not isinstance(url, str):
        raise refused(f"{path} must be a data URI", path, "invalid_type")
    return GivenImage(path, url=url, low=wants_low(f"{where}.detail", part.get("detail")))


def _text(where: str, part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise refused(f"{where} must be an object with a type", where)
    if kind in _MEDIA:
        path = f"{where}.type"
        message = f"{path}: '{kind}' is not supported: models read text, and images as 'input_image'"
        raise refused(message, path, "unsupported_content")
    if kind not in kinds:
        expected = " or ".join(kinds)
        raise refused(f"{where}.type must be {expected}, not {kind[:40]!a}", f"{where}.type", "invalid_value")
    name, known = _PARTS[kind]
    check_fields(where, part, known, _KINDS, "invalid_type")
    return text_in(where, part, name, may_be_empty=True)
