"""Chat templates on the command line: templates from files, and early errors for models without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import read_text
from realizar.errors import ChatTemplateError

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint

NO_CHAT = "the file has no chat template: `run --raw` completes text, --chat-template FILE adds a template"

ChatTemplateFile = Annotated[
    Path | None,
    Parameter(
        name=("--chat-template", "--chat-template-file"), help="File of a Jinja template that replaces the model's own."
    ),
]


def read_chat_template(file: Path | None) -> str | None:
    """Read a template file and check that it compiles; None for None.

    It raises InvalidRequestError if the file can't be read, and ChatTemplateError if it is malformed or too large.
    """
    if file is None:
        return None
    from realizar.tokenizer.templates.chat_template import MAX_TEMPLATE_CHARACTERS, compile_template

    source = read_text(file, MAX_TEMPLATE_CHARACTERS, "chat_template", "--chat-template can't read ")
    try:
        compile_template(source)
    except ChatTemplateError as error:
        raise ChatTemplateError(f"{file}: {error}") from error
    return source


def check_name_for_chat(model: str) -> None:
    """Raise ChatTemplateError, before a model is fetched, if it is known by its name to have no template."""
    from realizar.hub.pull import known_without_template

    if known_without_template(model):
        raise _no_template(model)


def check_checkpoint_for_chat(model: str, checkpoint: Checkpoint) -> None:
    """Raise ChatTemplateError, before weights are loaded, if a file has no template, or a malformed one."""
    from realizar.tokenizer.templates.chat_template import compile_template
    from realizar.tokenizer.templates.stored_templates import plain_template

    template = plain_template(checkpoint)
    if template is None:
        raise _no_template(model)
    try:
        compile_template(template)
    except ChatTemplateError as error:
        raise ChatTemplateError(f"{model}: {error} (--chat-template FILE replaces it)") from error


def _no_template(model: str) -> ChatTemplateError:
    return ChatTemplateError(
        f"{model} has no chat template and may be a base model: `realizar run --raw` completes text,"
        " --chat-template FILE adds a template"
    )
