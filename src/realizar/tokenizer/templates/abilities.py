"""The abilities that a chat template gives a model, as lists of models tell them."""

from __future__ import annotations

from realizar.errors import ChatTemplateError
from realizar.tokenizer.parsers.choose import format_of
from realizar.tokenizer.templates.chat_template import Compile, CompiledTemplate


def template_abilities(source: str, compiler: Compile | None = None) -> tuple[bool, bool]:
    """True for each of tools and reasoning that a template has; neither for one that is malformed."""
    try:
        template = CompiledTemplate(source, compiler=compiler)
        tools, form = template.takes_tools, format_of(template)
    except ChatTemplateError:
        return False, False
    return tools, form.reasoning is not None or form.in_channels
