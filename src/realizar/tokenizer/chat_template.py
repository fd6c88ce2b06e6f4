"""A model's own chat template: messages to prompt, as transformers renders it, and within bounds."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realizar.errors import ChatTemplateError
from realizar.tokenizer.chat_messages import (
    Message,
    TemplateBoundsError,
    TemplateTraits,
    adapt_messages,
    find_traits,
    with_texts,
)
from realizar.tokenizer.control_texts import ControlTextHider
from realizar.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

# Those in use have up to 30,000 characters and 1,500 nodes; compiling takes time and memory in proportion.
MAX_TEMPLATE_CHARACTERS = 48 << 10
_MAX_NODES = 6_000


class ChatTemplate:
    """Makes prompts of conversations.

    Args:
        tokenizer: of the model; its templates are used, its control tokens are kept out of users' texts.
        source: a template to use instead of the model's.

    Raises:
        ChatTemplateError: the model has no template; or it is malformed or too large, found out at the first use.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._sources = {"default": source} if source is not None else dict(tokenizer.chat_templates)
        if not self._sources:
            raise ChatTemplateError(
                "the model has no chat template: it may be a base model; use a raw prompt, or give a template"
            )
        self._compiled: dict[str, _Compiled] = {}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text.

        Args:
            messages: `role`, `content` (text, or parts of text), `tool_calls`, ... as OpenAI's API has them.
            tools: function descriptions, as OpenAI's API has them.
            add_generation_prompt: whether the prompt ends where the assistant's answer starts.
            variables: others that the template knows, such as `enable_thinking` or `documents`.

        Raises:
            ChatTemplateError: the template refuses, fails, or takes more time or memory than it may.
            InvalidRequestError: a message that no template can take; names the field.
        """
        return self._choose(tools).render(messages, tools, add_generation_prompt, variables)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The prompt's token ids, as `render` takes them.

        The template's control tokens are tokens; the same texts in a message stay text. There is one BOS where the
        model wants one, whether or not the template writes it.
        """
        compiled = self._choose(tools)
        hidden = self._hider.hide((messages, tools, variables))
        if hidden is None:
            return self._tokenizer.encode_rendered(compiled.render(messages, tools, add_generation_prompt, variables))
        safe_messages, safe_tools, safe_variables = hidden.value
        text = compiled.render(safe_messages, safe_tools, add_generation_prompt, safe_variables)
        return self._tokenizer.encode_rendered(text, hidden.mark)

    @functools.cached_property
    def _hider(self) -> ControlTextHider:
        return ControlTextHider(self._tokenizer.control_texts())

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> _Compiled:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            name = next(iter(self._sources))
        if name not in self._compiled:
            self._compiled[name] = _Compiled(self._sources[name], self._tokenizer.special_texts)
        return self._compiled[name]


class _Compiled:
    """One template, compiled, and what was found out about it by trying."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        # Templates add to these without asking whether the model has them.
        self._source, self._special_texts = source, {"bos_token": "", "eos_token": "", **special_texts}
        self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        adapted = adapt_messages(with_texts(messages), self._traits)
        return self._render(adapted, tools, add_generation_prompt, variables)

    @functools.cached_property
    def _traits(self) -> TemplateTraits:
        return find_traits(self._source, lambda messages: self._render(messages, None, False, {}))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        return _render_within_bounds(
            self._template,
            {
                **self._special_texts,
                **variables,
                "messages": messages,
                "tools": tools,
                "documents": variables.get("documents"),
                "add_generation_prompt": add_generation_prompt,
            },
        )


def _compile(source: str) -> Template:
    """Compiles a template.

    Raises:
        ChatTemplateError: it is too large or malformed.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ChatTemplateError(f"the chat template has {len(source)} characters, above {MAX_TEMPLATE_CHARACTERS}")
    from realizar.tokenizer.template_sandbox import BoundedEnvironment

    environment = BoundedEnvironment()
    try:
        tree = environment.parse(source)
        count = sum(1 for _ in _all_nodes(tree))
        if count > _MAX_NODES:
            raise ChatTemplateError(f"the chat template has {count} parts, above {_MAX_NODES}")
        return environment.from_string(tree)
    except ChatTemplateError:
        raise
    except RecursionError:
        raise ChatTemplateError("the chat template nests too deeply") from None
    except Exception as error:  # noqa: BLE001 - jinja2 and the compiler below it raise all kinds
        raise ChatTemplateError(f"the chat template is malformed: {_reason(error)}") from None
    except MemoryError:
        raise ChatTemplateError("the chat template nests too deeply") from None


def _all_nodes(tree: Any) -> Any:
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.iter_child_nodes())


def _render_within_bounds(template: Template, variables: Mapping[str, Any]) -> str:
    """Runs a compiled template.

    Raises:
        ChatTemplateError: it refuses, fails, or exceeds its bounds.
    """
    from realizar.tokenizer.template_budget import BoundExceededError, Budget, spending

    try:
        with spending(Budget(variables)):
            return "".join(template.root_render_func(template.new_context(dict(variables))))
    except ChatTemplateError:
        raise
    except BoundExceededError as error:
        raise TemplateBoundsError(f"the chat template {error}") from None
    except RecursionError:
        raise TemplateBoundsError("the chat template nests too deeply") from None
    except Exception as error:  # noqa: BLE001 - a template may raise whatever Python raises
        raise ChatTemplateError(f"the chat template failed: {_reason(error)}") from None
    except MemoryError:
        raise TemplateBoundsError("the chat template takes too much memory") from None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
