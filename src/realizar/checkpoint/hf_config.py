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
_STEMS = ("config", "generation_config", "hf_quant_config", "tokenizer_config")
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates"
_PROCESSOR_FILE = "chat_template.json"
_TEMPLATE_KEY = "chat_template"
_MAX_TEMPLATES = 16


def read_folder_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata files of a folder, by stem; a missing file has no entry.

    Returns:
        `config`, `generation_config`, `hf_quant_config`, `tokenizer_config` and `preprocessor_config` (dicts), and
        `chat_templates` (dict of texts by name; `default` is for plain chat). As in transformers, templates in files of
        their own replace those of `tokenizer_config.json`. Where neither has any, a processor's `chat_template.json`
        counts.

    Raises:
        CheckpointError: a file is too large, not UTF-8, or not strict JSON.
    """
    metadata: dict[str, Any] = {}
    for stem in _STEMS:
        path = folder / f"{stem}.json"
        if path.exists():
            metadata[stem] = read_json_object(path, MAX_JSON_BYTES)
    if processor := _read_processor(folder):
        metadata["preprocessor_config"] = processor
    if templates := _read_templates(folder, metadata.get("tokenizer_config", {})):
        metadata["chat_templates"] = templates
    return metadata


def refuse_remote_code(config: Mapping[str, Any], known_model_types: Collection[str]) -> None:
    """Raise UnsupportedModelError where `auto_map` names code of the repository's own. Such code is never executed.

    If `model_type` is known, `auto_map` is ignored and the known implementation is used.
    """
    auto_map = config.get("auto_map")
    if not auto_map or config.get("model_type") in known_model_types:
        return
    code = auto_map.get("AutoModelForCausalLM", auto_map) if isinstance(auto_map, Mapping) else auto_map
    raise UnsupportedModelError(
        f"model type {shown(str(config.get('model_type')))} needs code from its repository "
        f"(auto_map: {shown(str(code))}), which is never run"
    )


def _read_processor(folder: Path) -> dict[str, Any] | None:
    """How images are prepared: of `preprocessor_config.json`, or that part of the `processor_config.json` of newer
    folders.
    """
    path = folder / "preprocessor_config.json"
    if path.exists():
        return read_json_object(path, MAX_JSON_BYTES)
    path = folder / "processor_config.json"
    part = read_json_object(path, MAX_JSON_BYTES).get("image_processor") if path.exists() else None
    return part if isinstance(part, dict) else None


def _read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))}
    if (path := folder / _TEMPLATE_FILE).exists():
        paths["default"] = path
    if len(paths) > _MAX_TEMPLATES:
        raise CheckpointError(folder / _TEMPLATE_FOLDER, "files", f"more than {_MAX_TEMPLATES} chat templates")
    if paths:
        return {name: _read_text(path) for name, path in paths.items()}
    templates = _named(folder / "tokenizer_config.json", tokenizer_config.get(_TEMPLATE_KEY))
    if not templates and (path := folder / _PROCESSOR_FILE).exists():
        templates = _named(path, read_json_object(path, MAX_TEMPLATE_BYTES).get(_TEMPLATE_KEY))
    return templates


def _named(path: Path, value: Any) -> dict[str, str]:
    """The templates of a JSON file's key: one text, or a list or an object of several by name."""
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
    templates = value if isinstance(value, dict) else {} if value is None else {"default": value}
    if not all(isinstance(part, str) for pair in templates.items() for part in pair):
        raise CheckpointError(path, f"key '{_TEMPLATE_KEY}'", "is not text")
    return templates


def _read_text(path: Path) -> str:
    data = read_bounded(path, MAX_TEMPLATE_BYTES)
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"offset {error.start}", "the template is not valid UTF-8") from error
