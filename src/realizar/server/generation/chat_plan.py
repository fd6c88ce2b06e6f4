"""`plan_chat` prepares a conversation: its prompt, its sampling, and the parser of its answers. It runs nothing.

`plan_text` prepares a text to go on with, without a chat template; `after_ids` puts ids before a prepared prompt.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realizar.engine.images import ImageReader, PlacedImage, check_bounds, check_room, take_images
from realizar.errors import ContextLengthError
from realizar.images.given import EncodedImage, GivenImage, open_all, opening_once
from realizar.images.prepare import ANY_SIZE, PixelBounds
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.server.api import Api
from realizar.server.errors import about, refused, renaming, unsupported
from realizar.server.generation.conversation import Conversation, text_of
from realizar.server.generation.logprob_rows import LogprobRows, chat_rows
from realizar.server.generation.prompts import MAX_TOKENS, check_fits, keep_last, tokenize_prompts
from realizar.server.generation.sampling import (
    SamplingWishes,
    build_sampling,
    check_listed_ids,
    check_priority,
    fitting,
)
from realizar.server.generation.tools import ToolPlan
from realizar.server.http.work import Stop
from realizar.server.models.needs import no_template
from realizar.server.request_templates import RequestCompiler
from realizar.tokenizer.marks import CALL_STARTS
from realizar.tokenizer.parsers.choose import AnswerFormat, choose_parser, find_format, format_of
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.templates.chat_messages import Tools
from realizar.tokenizer.templates.chat_template import ChatTemplate
from realizar.tokenizer.tokenizer import Tokenizer

_PROMPT_END_TOKENS = 32
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_ROOM = 4  # where turns are dropped, the answer gets a quarter of the context, or what it may take if that is less
_MAX_KWARGS_CHARACTERS = 64 << 10
_RESERVED = ("messages", "tools", "add_generation_prompt", "self")  # the last is the template's own


_Opens = Callable[[Sequence[GivenImage]], list[EncodedImage]]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A prepared chat request.

    Attributes:
        answer_format: the format of the template that rendered the prompt.
        prompt_end: the prompt's last words, with control tokens spelled out.
        names: the request's names of the engine's fields, for errors.
        content_only: the whole answer is what a grammar describes: it has no reasoning, and no calls.
        prediction: ids of a text that the answer may repeat in part. call_ids: as of `Request`.
        cut_by_context: the context ends the answer before the request's `max_tokens` do.
        num_dropped: messages that the prompt leaves out for lack of room.
        marks: of calls and reasoning that the vocabulary has as tokens.
        rows: writes log-probabilities, if they are wanted.
        images: of the prompt, which are still to be encoded. rope_positions: as of `Request`.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    answer_format: AnswerFormat
    names: Mapping[str, str]
    tools: ToolPlan = field(default_factory=ToolPlan)
    prompt_end: str = ""
    priority: int = 0
    cache_salt: str | None = None
    reports_progress: bool = False
    prediction: tuple[int, ...] = ()
    call_ids: tuple[int, ...] = ()
    content_only: bool = False
    cut_by_context: bool = False
    num_dropped: int = 0
    marks: frozenset[str] = frozenset()
    rows: LogprobRows | None = None
    images: tuple[PlacedImage, ...] = ()
    rope_positions: bytes = field(default=b"", repr=False)

    @property
    def may_reason(self) -> bool:
        return not self.content_only and reasons(self.answer_format)

    def new_parser(self) -> OutputParser:
        if self.content_only:
            return AnswerParser(None, None)
        nested = self.sampling.structured is not None and self.sampling.structured.kind == "nested"
        return choose_parser(
            self.answer_format,
            self.tools.tools,
            parallel=self.tools.parallel,
            prompt_end=self.prompt_end,
            constrained=self.sampling.structured is not None,
            tokens=self.marks,
            calls_first=nested,
        )


def plan_chat(api: Api, conversation: Conversation, stop: Stop) -> ChatPlan:
    """Check a conversation and render its prompt. This may take a second, so it must not run on the event loop.

    `stop` is checked between the parts of the work. Raises ApiError or RealizarError where the request is refused.
    """
    with renaming(conversation.names):
        return _planned(api, conversation, stop)


def _planned(api: Api, conversation: Conversation, stop: Stop) -> ChatPlan:
    tools, tokenizer = conversation.tools, api.model.tokenizer
    sampling = _sampling(api, conversation)
    template = _template(api, conversation)
    variables = _variables(conversation, template)
    shown, num_messages, opens = tools.shown, len(conversation.messages), opening_once()
    if conversation.drops_oldest:
        conversation = _shortened(api, conversation, sampling.max_tokens, template, variables, opens, stop)
    _check_sizes(api, conversation)
    stop.check()
    # This renders the template, so that its errors come first.
    answer_format = format_of(template.compiled(shown, variables.get("documents")))
    with about("messages"):
        rendered = render_prompt(
            api, template, conversation.messages, shown, variables, add_prompt=conversation.add_prompt,
            continues=conversation.continues, bounds=conversation.image_bounds, opens=opens,
        )  # fmt: skip
        token_ids = rendered.token_ids
        if rendered.images:
            _check_images(rendered, api, conversation.keep_last)
        images = rendered.placed(stop)
    prompt_end = tokenizer.decode(token_ids[-_PROMPT_END_TOKENS:], skip_special=False)
    wanted = sampling.structured
    if conversation.continues and wanted is not None and not tools.forced:
        sampling = replace(sampling, structured_begun=_begun_ids(tokenizer, conversation.messages[-1]))
    else:
        sampling = replace(sampling, structured=_grammar(api, tools, wanted, answer_format, prompt_end))
    kept = keep_last(token_ids, conversation.keep_last, api.max_tokens)
    cut = False
    if conversation.bounded_by_context or not conversation.wishes.bounds_answer:
        sampling, cut = fitting(sampling, api.max_tokens - len(kept))
    return ChatPlan(
        token_ids=kept,
        sampling=sampling,
        tools=tools,
        answer_format=answer_format,
        prompt_end=prompt_end,
        priority=check_priority(conversation.priority, allowed=api.settings.allow_request_priority),
        cache_salt=conversation.cache_salt,
        names=_engine_names(conversation),
        reports_progress=conversation.reports_progress,
        prediction=_predicted(api, conversation.prediction),
        call_ids=_call_ids(tokenizer) if tools.tools else (),
        content_only=wanted is not None and sampling.structured is wanted,
        cut_by_context=cut,
        num_dropped=num_messages - len(conversation.messages),
        marks=frozenset(tokenizer.answer_marks),
        rows=_rows(api, sampling.logprobs, as_ids=conversation.tokens_as_ids),
        images=images,
        rope_positions=rendered.rope_positions,
    )


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The ids of a prompt, and its images, with the numbers of tokens before each run of their embeddings.

    `reader` is the model's, and reads them within `bounds`; None where there are none.
    """

    token_ids: list[int]
    images: Sequence[tuple[EncodedImage, tuple[int, ...]]] = ()
    reader: ImageReader | None = None
    bounds: PixelBounds = ANY_SIZE
    rope_positions: bytes = b""

    def placed(self, stop: Stop) -> tuple[PlacedImage, ...]:
        """The images in their places, not decoded; `stop` is checked before each."""
        found = []
        for image, starts in self.images:
            stop.check()
            assert self.reader is not None  # or there were no images
            found.append(self.reader.prepare(image, starts, self.bounds))
        return tuple(found)


def render_prompt(
    api: Api, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Tools | None,
    variables: Mapping[str, Any], *, add_prompt: bool = True, continues: bool = False,
    bounds: PixelBounds = ANY_SIZE, opens: _Opens = open_all,
) -> RenderedPrompt:  # fmt: skip
    """Render the prompt of checked messages; of their images, read within bounds, no more than the headers are read.

    Raises ApiError or RealizarError where the template or an image is refused, or the model reads text only.
    """
    marked, given = take_images(messages)
    if given and api.model.images is None:
        where = given[0].where
        raise refused(f"{where} is an image, and the model reads text only", where, "unsupported_content")
    check_bounds(api.model.images, bounds)
    if continues:
        token_ids = template.encode_unfinished(marked, tools, **variables)
    else:
        token_ids = template.encode(marked, tools, add_prompt, **variables)
    if not given or api.model.images is None:
        return RenderedPrompt(token_ids)
    images = opens(given)
    token_ids, starts, positions = api.model.images.expand(token_ids, images, bounds)
    return RenderedPrompt(token_ids, list(zip(images, starts, strict=True)), api.model.images, bounds, positions)


def _check_images(rendered: RenderedPrompt, api: Api, kept: int | None) -> None:
    """Refuse before they are decoded images that would be cut, and a prompt that is too long."""
    if kept is not None:
        raise unsupported("truncate_prompt_tokens", "can't be combined with images")
    check_room(len(rendered.token_ids), api.max_tokens)


def _rows(api: Api, top_n: int | None, *, as_ids: bool = False) -> LogprobRows | None:
    """Makes the names of all tokens too, unless they are there, which takes a while."""
    return None if top_n is None else api.names(as_ids=as_ids).rows(chat_rows, top_n)


def _call_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(sorted(token_id for text, token_id in tokenizer.answer_marks.items() if text in CALL_STARTS))


def _predicted(api: Api, text: str) -> tuple[int, ...]:
    check_fits(text, api.model.tokenizer, api.max_tokens, "prediction")
    return tuple(api.model.tokenizer.encode(text, add_special=False, parse_special=False)) if text else ()


def _shortened(
    api: Api,
    conversation: Conversation,
    max_tokens: int | None,
    template: ChatTemplate,
    variables: Mapping[str, Any],
    opens: _Opens,
    stop: Stop,
) -> Conversation:
    """The conversation without its oldest turns, if the answer would have too little of the context otherwise."""
    room = min(max_tokens or api.max_tokens, api.max_tokens // _ROOM)

    def fits(messages: list[Mapping[str, Any]]) -> bool:
        stop.check()
        given = replace(conversation, messages=[dict(each) for each in messages])
        try:
            _check_sizes(api, given)
            with about("messages"):
                rendered = render_prompt(
                    api, template, given.messages, given.tools.shown, variables, add_prompt=given.add_prompt,
                    bounds=given.image_bounds, opens=opens,
                )  # fmt: skip
        except ContextLengthError:
            return False
        return len(rendered.token_ids) + room <= api.max_tokens

    kept = without_oldest(conversation.messages, fits)
    return replace(conversation, messages=[dict(each) for each in kept])


def _engine_names(conversation: Conversation) -> Mapping[str, str]:
    names, tools = conversation.names, conversation.tools
    of_tools = tools.forced or (bool(tools.tools) and conversation.wishes.structured is None)
    constraint = "tools" if of_tools else "structured"
    return {
        "prompt": names.get("messages", "messages"),
        "structured": names.get(constraint, constraint),
        "tools": names.get("tools", "tools"),
    }


def _check_sizes(api: Api, conversation: Conversation) -> None:
    most = api.max_tokens if conversation.keep_last is None else max(api.max_tokens, MAX_TOKENS)
    tokenizer = api.model.tokenizer
    check_fits(text_of(conversation.messages), tokenizer, most, "messages")
    others = json.dumps([conversation.tools.shown, conversation.documents], ensure_ascii=False)
    check_fits(others, tokenizer, most, "tools")


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `chat_template_kwargs` sets. Raises ApiError: 400; a name is reserved or invalid, or the text too long."""
    for name in given or ():
        if name in _RESERVED or not name.isidentifier():
            path = f"chat_template_kwargs.{ascii(name[:80])[1:-1]}"
            raise refused(f"{path} can't be set", path, "invalid_value")
    if given and len(json.dumps(given, ensure_ascii=False)) > _MAX_KWARGS_CHARACTERS:
        raise refused("chat_template_kwargs are too large", "chat_template_kwargs", "string_too_long")
    return dict(given or {})


def _grammar(
    api: Api, tools: ToolPlan, wanted: StructuredOutput | None, answer_format: AnswerFormat, prompt_end: str
) -> StructuredOutput | None:
    """The grammar of a whole answer; None if it is free. `wanted` is for an answer that is no call."""
    return call_grammar(
        answer_format,
        tools.tools,
        structured=wanted,
        required=tools.required,
        name=tools.name,
        parallel=tools.parallel,
        mark_ids=api.model.tokenizer.answer_marks,
        prompt_end=prompt_end,
    )


def _sampling(api: Api, conversation: Conversation) -> SamplingParams:
    sampling = build_sampling(conversation.wishes, api.model)
    check_listed_ids(sampling, 1)
    if sampling.n > api.settings.max_choices:
        raise refused(f"n must be {api.settings.max_choices} at most, not {sampling.n}", "n", "invalid_value")
    return sampling


def _template(api: Api, conversation: Conversation) -> ChatTemplate:
    if conversation.template is not None:
        if not api.settings.allow_request_templates:
            raise unsupported("chat_template", "is not accepted: this server does not allow templates in requests")
        texts = {} if api.model.images is None else api.model.images.template_texts
        return ChatTemplate(api.model.tokenizer, conversation.template, RequestCompiler(), texts)
    if api.model.template is None:
        raise no_template()
    return api.model.template


def _variables(conversation: Conversation, template: ChatTemplate) -> dict[str, Any]:
    variables = dict(conversation.variables)
    compiled = template.compiled(conversation.tools.shown, conversation.documents)
    source = compiled.source
    if conversation.documents:
        if "documents" not in source:
            raise unsupported(
                "documents", "is not supported: the model's template does not show documents; put them into a message"
            )
        variables["documents"] = conversation.documents
    effort = conversation.reasoning_effort
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise refused(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort", "invalid_value")
    if "reasoning_effort" in source:
        variables.setdefault("reasoning_effort", effort)
    elif effort == "none" and "enable_thinking" in source:
        variables.setdefault("enable_thinking", False)
    elif effort != "medium" and not (effort == "none" and not reasons(format_of(compiled))):
        raise unsupported("reasoning_effort", "is not supported by this model")
    return variables


def reasons(form: AnswerFormat) -> bool:
    """True if answers of a format may have reasoning."""
    return form.reasoning is not None or form.in_channels


_MOST_ADDED = 4


def _begun_ids(tokenizer: Tokenizer, last: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that spell the text of a message, from which an answer within a grammar goes on.

    They need not be the prompt's own: a grammar reads bytes. Raises ApiError: 400; the text is in several parts, which
    a template may join in its own way, or the vocabulary has no ids for it alone.
    """
    content = last["content"]
    if isinstance(content, list):
        if len(content) > 1:
            raise refused("a message that a constrained answer goes on from must have one text", "messages")
        content = content[0]["text"]
    wanted = content.encode()
    for before in ("", "\n"):  # a vocabulary that puts a space before a text puts it before the line break
        ids = tokenizer.encode(before + content, add_special=False, parse_special=False)
        for num_added in range(_MOST_ADDED if before else 1):
            if b"".join(map(tokenizer.token_bytes, ids[num_added:])) == wanted:
                return tuple(ids[num_added:])
    raise refused("the vocabulary can't spell the text that a constrained answer goes on from", "messages")


_STEP = 4
"""Turns are dropped by so many: with one for each answer no prefix of the prompt would be found in the cache again."""
_SYSTEM = ("system", "developer")

_Messages = Sequence[Mapping[str, Any]]


def without_oldest(messages: _Messages, fits: Callable[[list[Mapping[str, Any]]], bool]) -> list[Mapping[str, Any]]:
    """The messages that fit: those of the system at the beginning, and the last turns, at least one.

    A turn begins with a message of the user's, behind the outputs of all calls before it: calls stay with theirs.
    `fits` is called a few times, as the logarithm of the number of messages.
    """
    num_system = next((place for place, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
    starts = [num_system, *_turns(messages, num_system + 1)]

    def shown(first: int) -> list[Mapping[str, Any]]:
        return [*messages[:num_system], *messages[starts[first] :]]

    if fits(shown(0)):
        return list(messages)
    dropped = bisect.bisect_left(range(1, len(starts)), True, key=lambda first: fits(shown(first))) + 1
    return shown(min(-(-dropped // _STEP) * _STEP, len(starts) - 1))


def _turns(messages: _Messages, first: int) -> list[int]:
    outputs = {each.get("tool_call_id"): place for place, each in enumerate(messages) if each["role"] == "tool"}
    turns, last_output = list[int](), -1
    for place, each in enumerate(messages):
        if place >= first and each["role"] == "user" and place > last_output:
            turns.append(place)
        for call in each.get("tool_calls", ()):
            last_output = max(last_output, outputs.get(call["id"], -1))
    return turns


def plan_text(
    api: Api, text: str, suffix: str, wishes: SamplingWishes, names: Mapping[str, str], stop: Stop
) -> ChatPlan:
    """Prepare a text. This may take a second, so it must not run on the event loop.

    An empty `suffix` goes on with the text; another is what follows the answer, for models that fill in a hole. `stop`
    is checked between the parts of the work. Raises ApiError or RealizarError where the request is refused.
    """
    with renaming(names):
        sampling = build_sampling(wishes, api.model)
        (prompt,) = tokenize_prompts(text, api, stop, param="prompt", suffix=suffix)
    sampling, cut = fitting(sampling, api.max_tokens - len(prompt.token_ids))
    return ChatPlan(
        token_ids=prompt.token_ids,
        sampling=sampling,
        answer_format=find_format(None),
        names={"prompt": "prompt", "structured": names.get("structured", "structured")},
        cut_by_context=cut,
        rows=_rows(api, sampling.logprobs),
    )


def after_ids(api: Api, plan: ChatPlan, earlier: Sequence[int]) -> ChatPlan:
    """A plan whose prompt comes after the ids, at least one, of an earlier exchange, which have the only BOS."""
    if plan.rope_positions:
        raise refused("context can't be combined with images of this model", "context")
    own = plan.token_ids
    if own[:1] == (api.model.tokenizer.bos_id,):
        own = own[1:]
    token_ids = (*earlier, *own)
    moved = len(token_ids) - len(plan.token_ids)
    images = tuple(replace(each, starts=tuple(start + moved for start in each.starts)) for each in plan.images)
    sampling, cut = fitting(plan.sampling, api.max_tokens - len(token_ids))
    return replace(
        plan, token_ids=token_ids, images=images, sampling=sampling, cut_by_context=cut or plan.cut_by_context
    )
