"""`plan_chat` prepares a chat request: its prompt, its sampling, and the parser of its answers. It runs nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.server.api import Api
from realizar.server.errors import ApiError, about, refused, unsupported
from realizar.server.generation.prompts import MAX_TOKENS, check_fits, keep_last
from realizar.server.generation.sampling import build_sampling, check_listed_ids, check_priority, check_top
from realizar.server.generation.tools import ToolPlan
from realizar.server.generation.work import Stop
from realizar.server.openai.messages import check_messages, text_of
from realizar.server.openai.neutral import check_neutral
from realizar.server.openai.records.chat import ChatCompletionRequest
from realizar.server.openai.structured import find_structured
from realizar.server.openai.tools import plan_tools
from realizar.server.openai.wishes import read_wishes
from realizar.tokenizer.parsers.base import OutputParser
from realizar.tokenizer.parsers.choose import AnswerFormat, choose_parser, find_format, opens_reasoning
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.harmony import final_start
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.templates.chat_template import ChatTemplate

_PROMPT_END_TOKENS = 32
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_KWARGS_CHARACTERS = 64 << 10
_RESERVED = ("messages", "tools", "add_generation_prompt", "self")  # the last is the template's own


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A prepared chat request.

    Attributes:
        token_ids: the prompt's token ids.
        sampling: the engine's sampling parameters.
        tools: the tools that may be called.
        answer_format: the format of the template that rendered the prompt.
        prompt_end: the prompt's last words, with control tokens spelled out.
        top_logprobs: log-probabilities to list for each token; None without log-probabilities.
        structured_field: the request's field that constrains the answer.
        priority: the request's priority.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tools: ToolPlan
    answer_format: AnswerFormat
    prompt_end: str
    top_logprobs: int | None
    structured_field: str
    priority: int

    def new_parser(self) -> OutputParser:
        """Make the parser of one answer."""
        if self.sampling.structured is not None and not self.tools.tools:
            return AnswerParser(None, None)  # the grammar leaves no room for reasoning
        return choose_parser(
            self.answer_format, self.tools.tools, parallel=self.tools.parallel, prompt_end=self.prompt_end
        )


def plan_chat(api: Api, request: ChatCompletionRequest, stop: Stop) -> ChatPlan:
    """Check a request and render its prompt. This may take a second, so it must not run on the event loop.

    Args:
        stop: checked between the parts of the work.

    Raises:
        ApiError, RealizarError: the request is refused.
    """
    api.check_model(request.model)
    check_neutral(request)
    max_tokens = api.max_tokens
    tools = plan_tools(request)
    found = find_structured(request, request.response_format)
    if found is not None and tools.tools:
        raise refused(f"{found[0]} can't be combined with tools; set tool_choice to 'none'", found[0])
    sampling = _sampling(api, request, None if found is None else found[1])
    template = _template(api, request)
    messages = check_messages(request.messages)
    add_prompt = request.add_generation_prompt is not False
    shown = tools.shown

    variables = _variables(request, template)
    tokenizer = api.model.tokenizer
    most = max_tokens if request.truncate_prompt_tokens is None else max(max_tokens, MAX_TOKENS)
    check_fits(text_of(messages), tokenizer, most, "messages")
    check_fits(json.dumps([shown, request.documents], ensure_ascii=False), tokenizer, most, "tools")
    stop.check()
    answer_format = find_format(template.source(shown))  # renders the template once, so that its errors come first
    with about("messages"):
        token_ids = template.encode(messages, shown, add_prompt, **variables)
    prompt_end = api.model.tokenizer.decode(token_ids[-_PROMPT_END_TOKENS:], skip_special=False)
    if answer_format.in_channels and sampling.structured is not None:
        # The grammar has room for the text alone, so the channel is written for the model.
        start = final_start(prompt_end)
        token_ids = [*token_ids, *tokenizer.encode(start, add_special=False)]
        prompt_end += start
    if tools.tools:
        sampling = replace(sampling, structured=_tool_grammar(api, tools, answer_format, prompt_end))
    return ChatPlan(
        token_ids=keep_last(token_ids, request.truncate_prompt_tokens, max_tokens),
        sampling=sampling,
        tools=tools,
        answer_format=answer_format,
        prompt_end=prompt_end,
        top_logprobs=request.top_logprobs or 0 if request.logprobs else None,
        structured_field="tools" if found is None else found[0],
        priority=check_priority(request.priority, allowed=api.settings.allow_request_priority),
    )


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables that `chat_template_kwargs` of a request set.

    Raises:
        ApiError: 400; a name is reserved or invalid, or the text is too long.
    """
    for name in given or ():
        if name in _RESERVED or not name.isidentifier():
            path = f"chat_template_kwargs.{ascii(name[:80])[1:-1]}"
            raise refused(f"{path} can't be set", path, "invalid_value")
    if given and len(json.dumps(given, ensure_ascii=False)) > _MAX_KWARGS_CHARACTERS:
        raise refused("chat_template_kwargs are too large", "chat_template_kwargs", "string_too_long")
    return dict(given or {})


def _tool_grammar(api: Api, tools: ToolPlan, answer_format: AnswerFormat, prompt_end: str) -> StructuredOutput | None:
    """The grammar that forces a call, or keeps the calls of strict tools to their schemas; None if none is needed."""
    return call_grammar(
        answer_format,
        tools.tools,
        required=tools.required,
        name=tools.name,
        parallel=tools.parallel,
        mark_ids=api.model.tokenizer.mark_ids,
        reasoning_open=opens_reasoning(answer_format.reasoning, prompt_end),
    )


def _sampling(api: Api, request: ChatCompletionRequest, structured: StructuredOutput | None) -> SamplingParams:
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options needs stream to be true", "stream_options", "invalid_value")
    if request.stream and request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "can't be combined with stream")
    top = check_top(request.top_logprobs, "top_logprobs") or 0
    wins = request.max_completion_tokens is not None
    wishes = read_wishes(
        request,
        max_tokens=request.max_completion_tokens if wins else request.max_tokens,
        max_tokens_field="max_completion_tokens" if wins else "max_tokens",
        logprobs=top if request.logprobs else None,
        prompt_logprobs=check_top(request.prompt_logprobs, "prompt_logprobs"),
        structured=structured,
    )
    sampling = build_sampling(wishes, api.model)
    check_listed_ids(sampling, 1)
    if sampling.n > api.settings.max_choices:
        raise refused(f"n must be {api.settings.max_choices} at most, not {sampling.n}", "n", "invalid_value")
    return sampling


def _template(api: Api, request: ChatCompletionRequest) -> ChatTemplate:
    if request.chat_template is not None:
        if not api.settings.allow_request_templates:
            raise unsupported("chat_template", "is not accepted: this server does not allow templates in requests")
        return ChatTemplate(api.model.tokenizer, request.chat_template)
    if api.model.template is None:
        raise ApiError(
            400,
            "the model has no chat template, so it can't chat: it may be a base model; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    return api.model.template


def _variables(request: ChatCompletionRequest, template: ChatTemplate) -> dict[str, Any]:
    """The variables of a template besides messages and tools."""
    variables = template_variables(request.chat_template_kwargs)
    if request.add_special_tokens:
        raise unsupported("add_special_tokens", "must be false: the chat template writes special tokens")
    source = template.source()
    if request.documents:
        if "documents" not in source:
            raise unsupported(
                "documents", "is not supported: the model's template does not show documents; put them into a message"
            )
        variables["documents"] = request.documents
    effort = request.reasoning_effort
    if effort is None:
        return variables
    if effort not in _EFFORTS:
        raise refused(f"reasoning_effort must be one of {', '.join(_EFFORTS)}", "reasoning_effort", "invalid_value")
    if "reasoning_effort" in source:
        variables.setdefault("reasoning_effort", effort)
    elif effort == "none" and "enable_thinking" in source:
        variables.setdefault("enable_thinking", False)
    elif effort != "medium" and not (effort == "none" and not _reasons(find_format(source))):
        raise unsupported("reasoning_effort", "is not supported by this model")
    return variables


def _reasons(form: AnswerFormat) -> bool:
    """True if answers of a format may have reasoning."""
    return form.reasoning is not None or form.in_channels
