"""Chat templates in a model's files, read without building its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint

_GGUF_KEY = "tokenizer.chat_template"


def stored_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Template texts by name; `default` is for plain chat. Empty for a base model."""
    if checkpoint.format == "gguf":
        return _gguf_templates(checkpoint.metadata)
    settings = checkpoint.metadata.get("tokenizer_config")
    return _folder_templates(checkpoint.metadata, settings if isinstance(settings, Mapping) else {})


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and templates with other names."""
    templates = {
        key.removeprefix(_GGUF_KEY + "."): value
        for key, value in metadata.items()
        if key.startswith(_GGUF_KEY + ".") and isinstance(value, str)
    }
    if isinstance(default := metadata.get(_GGUF_KEY), str):
        templates["default"] = default
    return templates


def _folder_templates(metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates of `tokenizer_config.json`, one or a list; `chat_template.jinja` replaces its default."""
    listed = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        templates = {
            item["name"]: item["template"]
            for item in listed
            if isinstance(item, Mapping) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        }
    if isinstance(text := metadata.get("chat_template"), str):
        templates["default"] = text
    return templates
