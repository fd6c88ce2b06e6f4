"""`select_files` chooses a repository's files that make up one model, by their names. Standard library only."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeAlias

from realizar.errors import UnknownModelError
from realizar.gguf_names import (
    PART,
    drafters_of,
    kind_of,
    models_of,
    quantization_of,
    towers_of,
    without_quantization,
)
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)

Room: TypeAlias = Callable[[], int]
"""Asks for the bytes that are free for a model. It is called where a choice depends on them."""

_PREFERRED_QUANTS = ("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "Q8_0")
_BESIDE_WEIGHTS, _BESIDE_BYTES = 1.1, 500_000_000
"""What a model takes: its files with a tenth more, and that many bytes, for workspace and a short KV cache. An encoder
of images beside it takes its file's."""
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
    repo: str, sizes: Mapping[str, int | None], wanted: str | None, room: Room | None = None, *, towers: bool = True
) -> tuple[str, ...]:
    """Choose the files to download, with the file to open first: all parts of a GGUF, or safetensors with JSON files.

    Behind a GGUF model come an encoder of images and a drafter that lie beside it, the first of `towers_of` and
    `drafters_of`.

    Args:
        sizes: bytes of every file of the repository by its name, with `/` between folders; None where not known.
        wanted: a model's quantisation (`Q4_K_M`) or a GGUF file's name; None takes safetensors, else the only GGUF
            model, else that of Q4_K_M or one like it.
        towers: false leaves an encoder beside the model where it is.
        room: with it that is the first of these that fits, else the largest file that does; a log line says which.

    Raises:
        UnknownModelError: no file or several files match, none fits, parts are missing, or there are only pickled
            weights.
    """
    names = list(sizes)
    ggufs = _in_parts(name for name in names if kind_of(name) is not None)
    models = {key: ggufs[key] for key in models_of(ggufs)}
    if wanted is not None:
        return _with_siblings(repo, _named(repo, ggufs, models, wanted), ggufs, models, towers=towers)
    safetensors = _safetensors(names)
    if safetensors:
        if "config.json" not in names:
            raise UnknownModelError(f"{repo} has safetensors but no config.json, so its architecture is not known")
        templates = [name for name in names if _MORE_TEMPLATES.fullmatch(name)]
        others = (_CONFIG_FILES - {"config.json"}).intersection(names)
        return ("config.json", *safetensors, *sorted(others.union(templates)))
    if models:
        files = _default(repo, ggufs if towers else {}, models, sizes, room)
        return _with_siblings(repo, files, ggufs, models, towers=towers)
    if any(name.lower().endswith(_PICKLES) for name in names):
        raise UnknownModelError(
            f"{repo} has only pickled weights, which are refused because they can run code when they are opened"
        )
    raise UnknownModelError(f"{repo} has neither GGUF nor safetensors files")


def _in_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """The parts of each file, by its name without a part's number."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(PART.sub(".gguf", name), []).append(name)
    return found


def _with_siblings(
    repo: str, files: list[str], ggufs: Mapping[str, list[str]], models: Mapping[str, list[str]], *, towers: bool
) -> tuple[str, ...]:
    own = PART.sub(".gguf", files[0])
    beside = [*towers_of(own, ggufs)[:towers], *drafters_of(own, ggufs)[:1]] if own in models else []
    return tuple(file for key in (own, *beside) for file in _checked(repo, ggufs[key]))


def _named(repo: str, ggufs: Mapping[str, list[str]], models: Mapping[str, list[str]], wanted: str) -> list[str]:
    for key, files in ggufs.items():
        if wanted in (key, PurePosixPath(key).name, *files):
            return files
    matches = [files for key, files in models.items() if quantization_of(key) == wanted.upper()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = ", ".join(files[0] for files in matches)
        raise UnknownModelError(f"{repo} has several files of {wanted}: {choices}; name one after the colon")
    raise UnknownModelError(f"{repo} has no file of {wanted}; it has: {_choices(models)}")


def _default(
    repo: str, ggufs: Mapping[str, list[str]], models: Mapping[str, list[str]], sizes: Mapping[str, int | None],
    room: Room | None,
) -> list[str]:  # fmt: skip
    if len(models) == 1:
        return next(iter(models.values()))
    keys: dict[str, list[str]] = {}
    for key in models:
        keys.setdefault(quantization_of(key) or "", []).append(key)
    single = {quant: models[matches[0]] for quant, matches in keys.items() if quant and len(matches) == 1}
    preferred = [quant for quant in _PREFERRED_QUANTS if quant in single]
    is_one_model = len({without_quantization(key) for key in models}) == 1
    if not preferred and (room is None or not is_one_model):
        raise UnknownModelError(f"{repo} has several models; add `:` and one of: {_choices(models)}")
    if room is None:
        return single[preferred[0]]
    free = room()
    bytes_of = {quant: sum(sizes[file] or 0 for file in files) for quant, files in single.items()}

    def needed(quant: str) -> float:
        tower = [file for key in towers_of(keys[quant][0], ggufs)[:1] for file in ggufs[key]]
        return bytes_of[quant] * _BESIDE_WEIGHTS + _BESIDE_BYTES + sum(sizes[file] or 0 for file in tower)

    fitting = [quant for quant in bytes_of if needed(quant) <= free]
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


def _choices(models: Mapping[str, list[str]]) -> str:
    return ", ".join(quantization_of(key) or PurePosixPath(key).name for key in models) or "no GGUF files at all"


def _checked(repo: str, files: list[str]) -> list[str]:
    match = PART.search(files[0])
    if match is not None and [_part(name) for name in files] != list(range(1, int(match.group(2)) + 1)):
        raise UnknownModelError(
            f"{repo}: {files[0]} is of {int(match.group(2))} parts, but the repository has {len(files)}"
        )
    return files


def _part(name: str) -> int:
    match = PART.search(name)
    return int(match.group(1)) if match else 0


def _safetensors(names: Sequence[str]) -> list[str]:
    """The weights at the root: one file, or the shards of one index, without other exports.

    A next-token block may have a shard of its own, which is named after it.
    """
    root = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    if "model.safetensors" in root:
        return ["model.safetensors"]
    shards = [name for name in root if name.startswith("model-")]
    if shards:
        return [*shards, *(name for name in root if name.startswith("mtp"))]
    return [name for name in root if not name.startswith(("adapter", "consolidated"))]
