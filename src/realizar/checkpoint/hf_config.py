"""The files beside safetensors weights: configuration, generation defaults, chat template. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from realizar.checkpoint.file_json import read_bounded, read_json_object
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError

MAX_JSON_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
_STEMS = ("config", "generation_config", "tokenizer_config")
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_KEY = "chat_template"


def read_folder_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata files of a folder, by stem; a missing file has no entry.

    Returns:
        `config`, `generation_config` and `tokenizer_config` (dicts), and `chat_template` (text; from
        `chat_template.jinja`, else from `tokenizer_config.json`).

    Raises:
        CheckpointError: a file is too large, not UTF-8, or not strict JSON.
    """
    metadata: dict[str, Any] = {}
    for stem in _STEMS:
        path = folder / f"{stem}.json"
        if path.exists():
            metadata[stem] = read_json_object(path, MAX_JSON_BYTES)
    template = _read_template(folder, metadata.get("tokenizer_config", {}))
    if template is not None:
        metadata[_TEMPLATE_KEY] = template
    return metadata


def refuse_remote_code(config: Mapping[str, Any], known_model_types: Collection[str]) -> None:
    """Refuse a model that needs code from its own repository. Such code is never executed.

    If `model_type` is known, `auto_map` is ignored and the known implementation is used.

    Raises:
        UnsupportedModelError: `auto_map` names code, and `model_type` is not among the known ones.
    """
    auto_map = config.get("auto_map")
    if not auto_map or config.get("model_type") in known_model_types:
        return
    code = auto_map.get("AutoModelForCausalLM", auto_map) if isinstance(auto_map, Mapping) else auto_map
    raise UnsupportedModelError(
        f"model type {shown(str(config.get('model_type')))} needs code from its repository "
        f"(auto_map: {shown(str(code))}), which is never run"
    )


def _read_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    path = folder / _TEMPLATE_FILE
    if path.exists():
        data = read_bounded(path, MAX_TEMPLATE_BYTES)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(path, f"offset {error.start}", "the template is not valid UTF-8") from error
    value = tokenizer_config.get(_TEMPLATE_KEY)
    if isinstance(value, list):  # Several templates by name: the one called `default` is for plain chat.
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(folder / "tokenizer_config.json", f"key '{_TEMPLATE_KEY}'", "is not text")
