"""Backends find formats by layout: none names a ggml type, but for the tables of kernels that read raw blocks."""

from __future__ import annotations

import re
from pathlib import Path

from realizar.checkpoint.ggml_types import GGMLType

BACKENDS = Path(__file__).parents[2] / "src" / "realizar" / "backends"
# Kernels that read the bytes of one layout as they lie in its file, and the tables that find them by layout.
RAW_BLOCKS = {
    "cpu/codegen/vector_codebook_blocks.py",
    "cpu/weights/repack_readers.py",
    "cuda/native/raw_layouts.py",
    "cuda/native/repack.cu",
}
_NUMBERS = ("F", "I", "BF")  # F32 and I8 are also names of registers' element types
_NAMES = [each.name for each in GGMLType if each.name.rstrip("0123456789") not in _NUMBERS]
_NAMED = re.compile(rf"\b(?:GGML\w*|ggml\w*|(?:TYPE_)?(?:{'|'.join(_NAMES)}))\b")


def named(path: Path) -> set[str]:
    return set(_NAMED.findall(path.read_text(encoding="utf-8")))


def test_backends_name_no_ggml_types() -> None:
    assert {"Q4_0", "Q8_K", "IQ2_XXS", "MXFP4"} <= set(_NAMES)
    files = [path for kind in ("py", "cu") for path in BACKENDS.rglob(f"*.{kind}")]
    assert len(files) > 100
    found = {path.relative_to(BACKENDS).as_posix(): names for path in files if (names := named(path))}
    assert {path: names for path, names in found.items() if path not in RAW_BLOCKS} == {}
    assert set(found) == RAW_BLOCKS, "a table that names none any more leaves the list"
