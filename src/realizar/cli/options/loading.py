"""`load_model` loads a model for a command, with progress on stderr."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from realizar.cli.options.chat_template import check_checkpoint_for_chat, check_name_for_chat
from realizar.cli.options.engine import EngineOptions
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.progress import download_progress

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.engine.llm import LLM


def fetch_model(model: str) -> Checkpoint:
    """Open a model by its name, showing downloads on stderr; errors as of `find_checkpoint`."""
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve

    with download_progress() as fetching:
        return open_checkpoint(resolve(model, fetching))


def load_model(model: str, options: EngineOptions, *, chat: bool = False, template: str | None = None) -> LLM:
    """Load a model for one request at a time, showing downloads and compilation on stderr.

    `template` is the text of a chat template in place of the model's own. ChatTemplateError: one is missing for a chat;
    raised before the weights are loaded, and if possible before they are fetched.
    """
    config = replace(options.config(), max_running=1)
    if chat and template is None:
        check_name_for_chat(model)
    checkpoint = fetch_model(model)
    if chat and template is None:
        check_checkpoint_for_chat(model, checkpoint)
    with load_progress() as loading:
        from realizar.engine.llm import LLM

        return LLM(checkpoint, config=config, chat_template=template, load_progress=loading)
