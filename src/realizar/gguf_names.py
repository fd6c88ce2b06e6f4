"""What names of GGUF files say: a quantisation, and which files lie beside a model. Standard library only.

Names are paths in a repository or below a folder, with `/` between folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d_[A-Z0-9_]+|I?Q\d|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32|FP32))(?=[-./]|$)",
    re.IGNORECASE,
)
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
"""The end of the name of a part of a model in several files."""
_TOWER = re.compile("mmproj")
_DRAFTERS = (
    re.compile(r"^mtp[-_.]"),  # at the end of a name it says that the model has its block
    re.compile(r"(?:^|[-_.])assistant(?=[-_.])"),
    re.compile(r"(?:^|[-_.])eagle-?3(?=[-_.])"),
    re.compile(r"(?:^|[-_.])dflash(?=[-_.])"),
)
"""Next-token blocks by themselves, assistants of Gemma's, EAGLE-3 heads and DFlash drafters, as names have them."""
_GENERAL = re.compile("model|gguf|[^a-z0-9]")
_TOWER_TYPES = ("F16", "BF16", "Q8_0", "F32")
_DRAFTER_TYPES = ("Q8_0", "BF16", "F16", "Q4_K_M")

Kind = Literal["model", "tower", "drafter"]


def quantization_of(name: str) -> str | None:
    """The quantisation in a GGUF file's name, in upper case, or None."""
    found = _QUANT.findall(re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE))
    return str(found[-1]).upper() if found else None


def without_quantization(name: str) -> str:
    """The last part of a name in lower case, without its quantisation."""
    return _QUANT.sub("", PurePosixPath(name).name.lower())


def is_later_part(name: str) -> bool:
    """True for a part of a model in several files that is not the first, which opens them all."""
    part = PART.search(name)
    return part is not None and int(part[1]) != 1


def kind_of(name: str) -> Kind | None:
    """What a GGUF file is by its name: a model, an encoder of images or a drafter; None for other files."""
    base = PurePosixPath(name).name.lower()
    if not base.endswith(".gguf") or "imatrix" in base:
        return None
    if _TOWER.search(base):
        return "tower"
    return "drafter" if any(pattern.search(base) for pattern in _DRAFTERS) else "model"


def models_of(names: Iterable[str]) -> list[str]:
    """The models among files, by name; where there are none the drafters, and where there are none of these the towers.

    So a repository of drafters has models to choose from.
    """
    kinds = {name: kind_of(name) for name in sorted(names)}
    for kind in ("model", "drafter", "tower"):
        if found := [name for name, each in kinds.items() if each == kind]:
            return found
    return []


def towers_of(model: str, names: Iterable[str]) -> list[str]:
    """The encoders of images that may be a model's, best first: in F16, which takes none of what it sees, then others.

    `names` are all files, and of those in parts the first ones. They lie in the model's folder, or one above it, of
    which the nearest comes first; those that name another model are none of this one's.
    """
    return _nearest(model, names, "tower", _TOWER_TYPES)


def drafters_of(model: str, names: Iterable[str]) -> list[str]:
    """The drafters that may be a model's, best first: of its own quantisation, then in Q8_0; otherwise as `towers_of`.

    Next-token blocks come first, then assistants, EAGLE-3 heads and DFlash drafters.
    """
    own = quantization_of(PurePosixPath(model).name)
    types = _DRAFTER_TYPES if own is None else (own, *_DRAFTER_TYPES)
    return sorted(_nearest(model, names, "drafter", types), key=_drafter_rank)


def _drafter_rank(name: str) -> int:
    base = PurePosixPath(name).name.lower()
    return next(place for place, pattern in enumerate(_DRAFTERS) if pattern.search(base))


def _nearest(model: str, names: Iterable[str], kind: Kind, types: tuple[str, ...]) -> list[str]:
    """Files of a kind beside a model, those that name it first, then those of the nearest folder, then by type."""
    if kind_of(model) == kind:
        return []
    above = PurePosixPath(model).parents
    subject = _subject(model)

    def rank(name: str) -> tuple[bool, int, int, str]:
        quantization = quantization_of(PurePosixPath(name).name)
        place = types.index(quantization) if quantization in types else len(types)
        return not _subject(name), above.index(PurePosixPath(name).parent), place, name

    there = [name for name in names if kind_of(name) == kind and not is_later_part(name)]
    there = [name for name in there if PurePosixPath(name).parent in above]
    own = [name for name in there if _subject(name) in subject or subject in _subject(name)]
    if not own and len({_subject(name) for name in there}) == 1:
        own = there  # spelled in another way
    return sorted(own, key=rank)


def _subject(name: str) -> str:
    """The letters and digits of a name that say what model a file is of; empty where none do."""
    base = PART.sub("", without_quantization(name)).removesuffix(".gguf")
    for pattern in (_TOWER, *_DRAFTERS):
        base = pattern.sub("-", base)
    return _GENERAL.sub("", base)
