"""`select_files` chooses a repository's files that make up one model, by their names. Standard library only."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeAlias

from realizar.errors import UnknownModelError
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)

Room: TypeAlias = Callable[[], int]
"""Asks for the bytes that are free for a model. It is called where a choice depends on them."""

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d_[A-Z0-9_]+|I?Q\d|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32|FP32))(?=[-./]|$)",
    re.IGNORECASE,
)
_PREFERRED_QUANTS = ("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "Q8_0")
_BESIDE_WEIGHTS, _BESIDE_BYTES = 1.1, 500_000_000
"""What a model takes: its files with a tenth more, and that many bytes, for workspace and a short KV cache."""
_NOT_A_MODEL = ("mmproj", "imatrix")
_CONFIG_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "model.safetensors.index.json",
    }
)
_MORE_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def select_files(
    repo: str, sizes: Mapping[str, int | None], wanted: str | None, room: Room | None = None
) -> tuple[str, ...]:
    """Choose the files to download, with the file to open first: all parts of a GGUF, or safetensors with JSON files.

    Args:
        sizes: bytes of every file of the repository by its name, with `/` between folders; None where not known.
        wanted: a quantisation (`Q4_K_M`) or a GGUF file's name; None takes safetensors, else the repository's only
            GGUF, else its Q4_K_M or one like it.
        room: with it that is the first of these that fits, else the largest file that does; a log line says which.

    Raises:
        UnknownModelError: no file or several files match, none fits, parts are missing, or there are only pickled
            weights.
    """
    names = list(sizes)
    models = _gguf_models(names)
    if wanted is not None:
        return _checked(repo, _named(repo, models, wanted))
    safetensors = _safetensors(names)
    if safetensors:
        if "config.json" not in names:
            raise UnknownModelError(f"{repo} has safetensors but no config.json, so its architecture is not known")
        templates = [name for name in names if _MORE_TEMPLATES.fullmatch(name)]
        others = (_CONFIG_FILES - {"config.json"}).intersection(names)
        return ("config.json", *safetensors, *sorted(others.union(templates)))
    if models:
        return _checked(repo, _default(repo, models, sizes, room))
    if any(name.lower().endswith(_PICKLES) for name in names):
        raise UnknownModelError(
            f"{repo} has only pickled weights, which are refused because they can run code when they are opened"
        )
    raise UnknownModelError(f"{repo} has neither GGUF nor safetensors files")


def _gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        base = PurePosixPath(name).name.lower()
        if base.endswith(".gguf") and not any(word in base for word in _NOT_A_MODEL):
            models.setdefault(_SPLIT.sub(".gguf", name), []).append(name)
    return models


def quantization_of(name: str) -> str | None:
    """The quantisation in a GGUF file's name, in upper case, or None."""
    found = _QUANT.findall(re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE))
    return str(found[-1]).upper() if found else None


def _named(repo: str, models: dict[str, list[str]], wanted: str) -> list[str]:
    for key, files in models.items():
        if wanted in (key, PurePosixPath(key).name, *files):
            return files
    matches = [files for key, files in models.items() if quantization_of(key) == wanted.upper()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = ", ".join(files[0] for files in matches)
        raise UnknownModelError(f"{repo} has several files of {wanted}: {choices}; name one after the colon")
    raise UnknownModelError(f"{repo} has no file of {wanted}; it has: {_choices(models)}")


def _default(repo: str, models: dict[str, list[str]], sizes: Mapping[str, int | None], room: Room | None) -> list[str]:
    if len(models) == 1:
        return next(iter(models.values()))
    keys: dict[str, list[str]] = {}
    for key in models:
        keys.setdefault(quantization_of(key) or "", []).append(key)
    single = {quant: models[matches[0]] for quant, matches in keys.items() if quant and len(matches) == 1}
    preferred = [quant for quant in _PREFERRED_QUANTS if quant in single]
    is_one_model = len({_without_quantization(key) for key in models}) == 1
    if not preferred and (room is None or not is_one_model):
        raise UnknownModelError(f"{repo} has several models; add `:` and one of: {_choices(models)}")
    if room is None:
        return single[preferred[0]]
    free = room()
    bytes_of = {quant: sum(sizes[file] or 0 for file in files) for quant, files in single.items()}
    fitting = [quant for quant, size in bytes_of.items() if size * _BESIDE_WEIGHTS + _BESIDE_BYTES <= free]
    candidates = [quant for quant in preferred if quant in fitting]
    if is_one_model:
        candidates += sorted(fitting, key=bytes_of.__getitem__, reverse=True)
    if not candidates:
        least = min(single, key=bytes_of.__getitem__)
        raise UnknownModelError(
            f"{repo}: none of its {len(models)} models fits into the {format_bytes(free)} that are free; {least} has"
            f" {format_bytes(bytes_of[least])} (a name after a colon takes any)"
        )
    quant = candidates[0]
    _LOG.warning(
        "%s has %d models: %s is taken (%s), as %s are free; a name after a colon takes another",
        repo, len(models), quant, format_bytes(bytes_of[quant]), format_bytes(free),
    )  # fmt: skip
    return single[quant]


def _without_quantization(key: str) -> str:
    return _QUANT.sub("", PurePosixPath(key).name.lower())


def _choices(models: dict[str, list[str]]) -> str:
    return ", ".join(quantization_of(key) or PurePosixPath(key).name for key in models) or "no GGUF files at all"


def _checked(repo: str, files: list[str]) -> tuple[str, ...]:
    match = _SPLIT.search(files[0])
    if match is not None and [_part(name) for name in files] != list(range(1, int(match.group(2)) + 1)):
        raise UnknownModelError(
            f"{repo}: {files[0]} is of {int(match.group(2))} parts, but the repository has {len(files)}"
        )
    return tuple(files)


def _part(name: str) -> int:
    match = _SPLIT.search(name)
    return int(match.group(1)) if match else 0


def _safetensors(names: Sequence[str]) -> list[str]:
    """The weights at the root: one file, or the shards of one index, without other exports."""
    root = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    if "model.safetensors" in root:
        return ["model.safetensors"]
    shards = [name for name in root if name.startswith("model-")]
    return shards or [name for name in root if not name.startswith(("adapter", "consolidated"))]
