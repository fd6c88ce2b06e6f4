"""`load_model` loads a model for a command, with progress on stderr."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from realizar.cli.options.chat_template import check_checkpoint_for_chat, check_name_for_chat
from realizar.cli.options.engine import DraftOptions, EngineOptions
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.progress import download_progress

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.config import EngineConfig
    from realizar.engine.llm import LLM


def fetch_model(model: str) -> Checkpoint:
    """Open a model by its name, showing downloads on stderr; errors as of `find_checkpoint`."""
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve

    with download_progress() as fetching:
        return open_checkpoint(resolve(model, fetching))


def with_drafter(config: EngineConfig) -> EngineConfig:
    """The same, with the path of a model that drafts in place of its name; errors as of `find_checkpoint`."""
    if config.draft_model is None:
        return config
    return replace(config, drafter=str(fetch_model(config.draft_model).path.absolute()))


def load_model(
    model: str, options: EngineOptions, drafts: DraftOptions | None = None, *, chat: bool = False,
    template: str | None = None,
) -> LLM:  # fmt: skip
    """Load a model for one request at a time, showing downloads and compilation on stderr.

    `template` is the text of a chat template in place of the model's own. ChatTemplateError: one is missing for a chat;
    raised before the weights are loaded, and if possible before they are fetched.
    """
    config = (drafts or DraftOptions()).config(replace(options.config(), max_running=1))
    if chat and template is None:
        check_name_for_chat(model)
    checkpoint = fetch_model(model)
    if chat and template is None:
        check_checkpoint_for_chat(model, checkpoint)
    config = with_drafter(config)
    with load_progress() as loading:
        from realizar.engine.llm import LLM

        return LLM(checkpoint, config=config, chat_template=template, load_progress=loading)
