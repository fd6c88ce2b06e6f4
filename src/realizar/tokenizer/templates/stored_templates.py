"""Chat templates in a model's files, read without building its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint


_GGUF_KEY = "tokenizer.chat_template"


def stored_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Template texts by name; `default` is for plain chat. Empty for a base model."""
    metadata, prefix = checkpoint.metadata, f"{_GGUF_KEY}."
    if checkpoint.format != "gguf":
        return dict(metadata.get("chat_templates", {}))
    named = ((key, text) for key, text in metadata.items() if key.startswith(prefix) and isinstance(text, str))
    templates = {key.removeprefix(prefix): text for key, text in named}
    if isinstance(default := metadata.get(_GGUF_KEY), str):
        templates["default"] = default
    return templates


def plain_template(checkpoint: Checkpoint) -> str | None:
    """The template for plain chat, or the only one there is; None for a base model."""
    templates = stored_templates(checkpoint)
    return templates.get("default", next(iter(templates.values()), None))
