"""`ChatTemplate` renders messages to a prompt with a model's own template, as transformers does, within bounds."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from realizar.errors import ChatTemplateError
from realizar.tokenizer.marks import LFM2_CALLS, LFM2_CALLS_END, LFM2_TOOLS, REASONING_MARKS, RESPONSE, RESPONSE_END
from realizar.tokenizer.templates.chat_messages import (
    Message,
    Messages,
    TemplateBoundsError,
    TemplateFailedError,
    TemplateTraits,
    Tools,
    adapt_messages,
    find_traits,
    has_images,
    plain_text,
    with_texts,
)
from realizar.tokenizer.templates.control_texts import AnswerText, ControlTextHider
from realizar.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template


Render: TypeAlias = Callable[[Mapping[str, Any]], str]
"""A compiled template: makes its text of its variables."""
Compile: TypeAlias = Callable[[str], tuple[Render, bool]]
"""Compiles a template's source, as `compile_template` does."""

# Known templates have up to 30,000 characters and 1,500 nodes; compiling takes time and memory in proportion.
MAX_TEMPLATE_CHARACTERS = 48 << 10
_MAX_NODES = 6_000
_SPLIT_AT = re.compile(r"""split\(\s*['"]([^'"]+)['"]""")
_BREAK = "\ufdd0\ufdd1\ufdd0"  # noncharacters: the place in a rendered message where the model goes on
_NEEDLE_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "lookup",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": []},
    },
}


class ChatTemplate:
    """Renders conversations to prompts; control tokens are kept out of users' texts.

    `source` replaces the model's template, or names one of the model's; `compiler` compiles templates, which run in
    this process by default. Texts that the template writes are `replaced` before they become tokens. Raises
    ChatTemplateError where the model has no template; a malformed or too large one raises at its first use.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | None = None,
        compiler: Compile | None = None,
        replaced: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer, self._compiler, self._replaced = tokenizer, compiler or compile_template, replaced or {}
        stored = tokenizer.chat_templates
        self._sources = dict(stored) if source is None else {"default": stored.get(source, source)}
        if not self._sources:
            raise ChatTemplateError(
                "the model has no chat template: it may be a base model; use a raw prompt, or give a template"
            )
        self._compiled: dict[str, CompiledTemplate] = {}

    def render(
        self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render the prompt's text.

        Args:
            messages: `role`, `content` (text, or parts of text and marks of images), `tool_calls`, ... in the format of
                OpenAI's API.
            tools: function descriptions in the format of OpenAI's API. If the template does not show tools, they go
                into the system message, with the form of calls that the style `json` parses.
            add_generation_prompt: end the prompt where the assistant's answer starts.
            variables: further variables of the template, such as `enable_thinking` or `documents`.

        Raises:
            ChatTemplateError: the template raises an error, fails, or exceeds its bounds of time or memory.
            InvalidRequestError: a message is invalid; names the field.
        """
        return self.compiled(tools, variables.get("documents")).render(
            messages, tools, add_generation_prompt, variables
        )

    def encode(
        self, messages: Messages, tools: Tools | None = None, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Render the prompt's token ids; the arguments are those of `render`.

        The template's control tokens become tokens, while the same texts in a message stay text. In what the assistant
        wrote the marks of reasoning, and others at which the template splits, stay marks: the prompt is what
        transformers makes. If the model wants a BOS, the prompt has exactly one, whether or not the template writes it.
        """
        return self._tokenizer.encode_rendered(*self._render_safely(messages, tools, add_generation_prompt, variables))

    def _render_safely(
        self, messages: Messages, tools: Tools | None, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> tuple[str, Mapping[int, str] | None]:
        """The text with marks in what would be control tokens, and what removes them: None where there are none."""
        compiled = self.compiled(tools, variables.get("documents"))
        hidden = self._hider.hide((_with_answers(messages), tools, variables))
        given, safe_tools, safe_variables = (messages, tools, variables) if hidden is None else hidden.value
        text = compiled.render(given, safe_tools, add_generation_prompt, safe_variables)
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text, None if hidden is None else hidden.restore

    def encode_unfinished(self, messages: Messages, tools: Tools | None = None, **variables: Any) -> list[int]:
        """Render the token ids of a prompt that ends within its last message, for the model to go on with it.

        Raises as `render` does, and ChatTemplateError where the template leaves the last message's end out.
        """
        *before, last = with_texts(messages)
        rendered, restore = self._render_safely([*before, _broken_off(last)], tools, False, variables)
        text, found, _ = rendered.rpartition(_BREAK)
        if not found:
            raise ChatTemplateError("the chat template leaves out the end of the message that is to be continued")
        return self._tokenizer.encode_rendered(text, restore)

    def source(self, tools: Tools | None = None, documents: Any = None) -> str:
        """The source of the template that is used with these tools or documents, or with neither."""
        return self._sources[self._chosen_name(tools, documents)]

    def compiled(self, tools: Tools | None = None, documents: Any = None) -> CompiledTemplate:
        """That template; ChatTemplateError where it is empty, malformed or too large."""
        name = self._chosen_name(tools, documents)
        if name not in self._compiled:
            special_texts = self._tokenizer.special_texts
            self._compiled[name] = CompiledTemplate(self._sources[name], special_texts, self._compiler)
        return self._compiled[name]

    @functools.cached_property
    def _hider(self) -> ControlTextHider:
        texts = self._tokenizer.control_texts().union(self._tokenizer.mark_ids)
        sources = "".join(self._sources.values())
        marks = {mark for pair in REASONING_MARKS for mark in (pair.start, pair.end) if mark in sources}
        return ControlTextHider(texts, texts.intersection(marks.union(_SPLIT_AT.findall(sources))))

    def _chosen_name(self, tools: Tools | None, documents: Any) -> str:
        """As in transformers, by the names that models give their templates; without `default` it is the first."""
        wanted = ["tool_use"] if tools else ["rag"] if documents else []
        return next((name for name in (*wanted, "default") if name in self._sources), next(iter(self._sources)))


def _with_answers(messages: Messages) -> Messages:
    return [
        {**message, "content": _as_answer(message["content"])}
        if message.get("role") == "assistant" and message.get("content")
        else message
        for message in messages
    ]


def _as_answer(content: Any) -> Any:
    if isinstance(content, str):
        return AnswerText(content)
    if not isinstance(content, list | tuple):
        return content
    return [
        {**part, "text": AnswerText(part["text"])}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]


def _broken_off(message: Message) -> dict[str, Any]:
    """A message with the mark of a break at the end of its text, or of its last part's."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + _BREAK}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + _BREAK}]}


class CompiledTemplate:
    """A compiled template, with what was found out by rendering; raises as `compile_template` does."""

    def __init__(
        self, source: str, special_texts: Mapping[str, str] | None = None, compiler: Compile | None = None
    ) -> None:
        # Templates concatenate these texts without checking that the model has them.
        self.source, self._special_texts = source, {"bos_token": "", "eos_token": "", **(special_texts or {})}
        self._make_text, self._names_tools = (compiler or compile_template)(source)

    def render(
        self, messages: Messages, tools: Tools | None, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        checked = with_texts(messages)
        if "tool_calls" not in self.source and _has_tool_messages(checked):
            is_python = any(text in self.source for text in LFM2_TOOLS)
            checked = (_spell_python_calls if is_python else spell_tool_messages)(checked)
        if tools and not self.takes_tools:
            return self._render_with_tool_text(checked, tools, add_generation_prompt, variables)
        return self._render(adapt_messages(checked, self._traits), tools, add_generation_prompt, variables)

    def _render_with_tool_text(
        self, messages: Messages, tools: Tools, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Render tools as text in the system message, or in the user's if the template refuses a system message."""
        text = tools_as_system_text(tools)
        placed = adapt_messages(with_system_text(messages, text), self._traits)
        try:
            return self._render(placed, None, add_generation_prompt, variables)
        except TemplateFailedError:
            placed = adapt_messages(with_first_user_text(messages, text), self._traits)
            return self._render(placed, None, add_generation_prompt, variables)

    @functools.cached_property
    def takes_tools(self) -> bool:
        """True if the template shows tools: it reads them, and a tool changes the prompt."""
        if not self._names_tools:
            return False
        question = [{"role": "user", "content": "x"}]
        shown: list[str | None] = []
        for tools in (None, [_NEEDLE_TOOL]):
            try:
                shown.append(self._render(question, tools, True, {}))
            except TemplateFailedError:
                shown.append(None)
        return shown[1] is not None and shown[0] != shown[1]

    @functools.cached_property
    def in_response(self) -> bool:
        """True if the template writes the content of an assistant's message between the marks of a response.

        Raises ChatTemplateError where the template fails on a short conversation.
        """
        if RESPONSE not in self.source:
            return False
        answer = {"role": "assistant", "content": "needle", "reasoning_content": "x"}
        text = self.render([{"role": "user", "content": "x"}, answer], None, False, {})
        before, found, after = text.partition("needle")
        return bool(found) and before.rstrip().endswith(RESPONSE) and after.lstrip().startswith(RESPONSE_END)

    @functools.cached_property
    def _traits(self) -> TemplateTraits:
        return find_traits(self.source, lambda messages: self._render(messages, None, False, {}))

    def _render(
        self, messages: Messages, tools: Tools | None, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        return self._make_text(
            {
                **self._special_texts,
                **variables,
                "messages": messages,
                "tools": tools,
                "documents": variables.get("documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )


def compile_template(source: str) -> tuple[Render, bool]:
    """Compile a template; also True if it reads a variable `tools`.

    Raises TemplateFailedError for a template that is empty, malformed or too large.
    """
    if not source.strip():
        raise TemplateFailedError("the chat template is empty")
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateFailedError(f"the chat template has {len(source)} characters, above {MAX_TEMPLATE_CHARACTERS}")
    from jinja2 import nodes

    from realizar.tokenizer.templates.sandbox import BoundedEnvironment

    environment = BoundedEnvironment()
    try:
        tree = environment.parse(source)
        count = 1 + sum(1 for _ in tree.find_all(nodes.Node))
        if count > _MAX_NODES:
            raise TemplateFailedError(f"the chat template has {count} parts, above {_MAX_NODES}")
        names_tools = any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name))
        return functools.partial(_render_within_bounds, environment.from_string(tree)), names_tools
    except TemplateFailedError:
        raise
    except (RecursionError, MemoryError):
        raise TemplateFailedError("the chat template nests too deeply") from None
    except Exception as error:  # noqa: BLE001 - jinja2 and the compiler below it raise all kinds
        raise TemplateFailedError(f"the chat template is malformed: {_reason(error)}") from None


def _render_within_bounds(template: Template, variables: Mapping[str, Any]) -> str:
    """Run a template; TemplateFailedError where it raises an error or fails, TemplateBoundsError beyond its bounds."""
    from realizar.tokenizer.templates.budget import BoundExceededError, Budget, spending

    try:
        with spending(Budget(variables)):
            return "".join(template.root_render_func(template.new_context(dict(variables))))
    except TemplateFailedError:
        raise
    except BoundExceededError as error:
        raise TemplateBoundsError(f"the chat template {error}") from None
    except RecursionError:
        raise TemplateBoundsError("the chat template nests too deeply") from None
    except MemoryError:
        raise TemplateBoundsError("the chat template takes too much memory") from None
    except Exception as error:  # noqa: BLE001 - a template may raise whatever Python raises
        raise TemplateFailedError(f"the chat template failed: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# Tools and calls as text in messages, for templates that do not show them.

_CALLING = """\
To call a function, answer with nothing but a JSON object: {"name": "<its name>", "arguments": {<its arguments>}}
To call several, answer with a JSON list of such objects. If no function is needed, answer in plain text."""


def tools_as_system_text(tools: Tools) -> str:
    """A text that describes functions, in the format of OpenAI's API, with the form of calls that `json` parses."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return "\n".join(["You can call these functions, described in JSON, one a line:", *lines, "", _CALLING])


def with_system_text(messages: Messages, text: str) -> list[dict[str, Any]]:
    copies = [dict(message) for message in messages]
    if copies[0]["role"] in ("system", "developer"):
        copies[0]["content"] = _joined(copies[0].get("content"), text)
        return copies
    return [{"role": "system", "content": text}, *copies]


def with_first_user_text(messages: Messages, text: str) -> list[dict[str, Any]]:
    """Add a text and the system message's text before the first user message, for templates without a system role."""
    copies = [dict(message) for message in messages]
    if copies[0]["role"] in ("system", "developer"):
        text = _joined(plain_text(copies.pop(0).get("content")), text)
    for message in copies:
        if message["role"] == "user":
            message["content"] = _joined(text, plain_text(message.get("content")))
            return copies
    return [{"role": "user", "content": text}, *copies]


def _has_tool_messages(messages: Messages) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def spell_tool_messages(messages: Messages) -> list[dict[str, Any]]:
    """Write calls as the assistant's text, in the form described above, and their results as the user's text.

    A user's message after a result is appended to it, since many templates want roles to alternate.
    """
    spelled: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    follows_result = False
    for message in messages:
        role, content = message["role"], message.get("content")
        if calls := message.get("tool_calls"):
            names.update(
                {call["id"]: call["function"]["name"] for call in calls if "id" in call and "function" in call}
            )
            spelled.append({"role": role, "content": _joined(plain_text(content), _spelled_calls(calls))})
        elif role == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "")
            result = _spelled_result(name, content)
            if follows_result:
                spelled[-1]["content"] = _followed(spelled[-1]["content"], result, "\n")
            else:
                spelled.append({"role": "user", "content": result})
        elif role == "user" and follows_result:
            added = content if has_images(content) else plain_text(content)
            spelled[-1]["content"] = _followed(spelled[-1]["content"], added, "\n\n")
        else:
            spelled.append(dict(message))
        follows_result = role == "tool"
    return spelled


def _spelled_result(name: str, content: Any) -> Any:
    """A result as text in JSON; its images, if it has any, stay parts behind it."""
    images = [part for part in content if "text" not in part] if has_images(content) else []
    text = plain_text([part for part in content if "text" in part] if images else content)
    result = json.dumps({"result_of": name, "content": text}, ensure_ascii=False)
    return [{"type": "text", "text": result}, *images] if images else result


def _followed(first: Any, second: Any, between: str) -> Any:
    """Two contents as one: text, or parts where either has some."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [
        part
        for content in (first, second)
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def _spell_python_calls(messages: Messages) -> list[dict[str, Any]]:
    """Write calls as LFM2 does into the assistant's text. Results stay messages, which its templates show."""
    spelled = []
    for message in messages:
        copy = dict(message)
        if calls := copy.pop("tool_calls", None):
            text = ", ".join(_python_call(call.get("function", call)) for call in calls)
            copy["content"] = f"{plain_text(copy.get('content'))}{LFM2_CALLS}[{text}]{LFM2_CALLS_END}"
        spelled.append(copy)
    return spelled


def _python_call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{key}={_python_value(value)}" for key, value in arguments.items())
    return f"{function.get('name', '')}({arguments})"


def _python_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | Mapping) else str(value)


def _spelled_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    objects = []
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        objects.append(f'{{"name": {json.dumps(function.get("name", ""))}, "arguments": {text or "{}"}}}')
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _joined(first: Any, second: str) -> Any:
    if isinstance(first, list | tuple):
        return [*first, {"type": "text", "text": second}]
    return f"{first}\n\n{second}" if first and second else first or second
