"""The abilities that a chat template gives a model, as lists of models tell them."""

from __future__ import annotations

from realizar.errors import ChatTemplateError
from realizar.tokenizer.parsers.choose import find_format
from realizar.tokenizer.templates.chat_template import template_takes_tools


def template_abilities(source: str) -> tuple[bool, bool]:
    """True for each of tools and reasoning that a template has; neither for one that is malformed."""
    form = find_format(source)
    try:
        tools = template_takes_tools(source)
    except ChatTemplateError:
        return False, False
    return tools, form.reasoning is not None or form.in_channels
