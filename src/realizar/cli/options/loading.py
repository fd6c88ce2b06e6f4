"""`load_model` loads a model for a command, with progress on stderr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from realizar.cli.options.chat_template import check_checkpoint_for_chat, check_name_for_chat
from realizar.cli.options.engine import EngineOptions
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.progress import download_progress

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class ForChat:
    """Marks that a model is loaded for a chat. `template` is the text of one that replaces the model's own."""

    template: str | None = None


def fetch_model(model: str) -> Checkpoint:
    """Open a model by its name, showing downloads on stderr; errors as of `find_checkpoint`."""
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve

    with download_progress() as fetching:
        return open_checkpoint(resolve(model, fetching))


def load_model(model: str, options: EngineOptions, *, max_running: int = 1, chat: ForChat | None = None) -> LLM:
    """Load a model, showing downloads and compilation on stderr; `chat` is None if no chat template is needed.

    ChatTemplateError: one is missing; raised before the weights are loaded, and if possible before they are fetched.
    """
    config = options.config(max_running=max_running)
    if chat is not None and chat.template is None:
        check_name_for_chat(model)
    checkpoint = fetch_model(model)
    if chat is not None and chat.template is None:
        check_checkpoint_for_chat(model, checkpoint)
    with load_progress() as loading:
        from realizar.engine.llm import LLM

        return LLM(
            checkpoint,
            config=config,
            chat_template=None if chat is None else chat.template,
            load_progress=loading,
        )
