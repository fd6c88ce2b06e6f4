"""Chat templates in a model's files, read without building its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint


_GGUF_KEY = "tokenizer.chat_template"


def stored_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Template texts by name; `default` is for plain chat. Empty for a base model."""
    if checkpoint.format == "gguf":
        return _gguf_templates(checkpoint.metadata)
    return dict(checkpoint.metadata.get("chat_templates", {}))


def plain_template(checkpoint: Checkpoint) -> str | None:
    """The template for plain chat, or the only one there is; None for a base model."""
    templates = stored_templates(checkpoint)
    return templates.get("default", next(iter(templates.values()), None))


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {
        key.removeprefix(_GGUF_KEY + "."): value
        for key, value in metadata.items()
        if key.startswith(_GGUF_KEY + ".") and isinstance(value, str)
    }
    if isinstance(default := metadata.get(_GGUF_KEY), str):
        templates["default"] = default
    return templates
