"""Renamed words do not come back: identifiers of Python and CUDA C++ and names of files are without them."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A word of an identifier, between underscores or capitals, and the word that is used instead.
WORDS = {
    "product": "matmul",
    "products": "matmuls",
    "ending": "epilogue",
    "endings": "epilogues",
    "turned": "rotated",
    "joins": "adds to the residual stream",
    "told": "reported",
    "tell": "report",
    "tells": "reports",
    "vigilance": "liveness policy",
    "leaving": "disconnect or abort",
    "pieces": "deltas of an answer; chunks or parts of other things",
}
# Whole identifiers, below a folder.
NAMES = {
    "FollowedRow": ("", "GrammarRow"),
    "FollowedGrammar": ("", "KnownGrammar"),
    "_take_news": ("structured/", "_take_events"),
    "deferred_norm": ("", "the norm's factor is folded into the next matmul"),
    "DeferredNorm": ("", "the norm's factor is folded into the next matmul"),
    "is_third": ("", "a name that says what differs"),
    "squares": ("backends/cuda/", "partial sums of squares"),
    "users": ("kv_cache/", "reference count"),
    "num_users": ("kv_cache/", "reference count"),
    "_users": ("kv_cache/", "reference count"),
    "Decoder": ("models/", "SpecBuilder"),
    "Settings": ("models/", "HyperParameters"),
    "form": ("src/realizar/backends/", "weight_format, activation_format or input_format"),
    "forms": ("src/realizar/backends/", "weight_formats or input_formats"),
    "Form": ("backends/cuda/matmul/", "InputFormat"),
    "Choice": ("backends/cuda/matmul/", "Tiling"),
    "are_held": ("", "are_deferred"),
    "may_be_held": ("", "may_be_deferred"),
    "holds_grammar": ("", "acquire_grammar"),
    "SnapshotPlaces": ("", "SnapshotPositions"),
    "mask_places": ("", "mask_indices"),
    "ModelFiles": ("backends/", "ModelSource"),
    "rows_between": ("quantization/", "slice_out_features"),
    "columns_between": ("quantization/", "slice_columns"),
}
# Words of other programs' vocabularies: a folder or file, the word, and its meaning there.
ALLOWED = {
    ("tokenizer/", "pieces"): "tokens of SentencePiece and WordPiece",
    ("scripts/attention/", "product"): "torch's attention",
    ("backends/cuda/tower", "product"): "torch's attention",
}
_SUFFIXES = (".py", ".cu", ".js")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_C_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


def _files() -> Iterator[Path]:
    for folder in ("src", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES and path != Path(__file__) and path.parent.name != "vendor":
                yield path


def _python_names(text: str) -> Iterator[str]:
    """Identifiers; `product` stays out where it is a member of itertools."""
    from_itertools = re.search(r"^from itertools import .*\bproduct\b", text, re.MULTILINE) is not None
    before = ("", "")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.NAME:
            before = (before[1], token.string)
            continue
        is_itertools = token.string == "product" and (from_itertools or before == ("itertools", "."))
        before = (before[1], token.string)
        if not is_itertools:
            yield token.string


def _names(text: str, suffix: str) -> set[str]:
    if suffix == ".py":
        return set(_python_names(text))
    return set(re.findall(r"[A-Za-z_]\w*", _C_TEXT.sub(" ", text))) if suffix == ".cu" else set()


def _faults(place: str, names: set[str]) -> Iterator[str]:
    """Forbidden identifiers, each with the word to use. `place` is a path, which counts as an identifier too."""
    for name in sorted({Path(place).stem, *names}):
        for word in sorted({part.lower() for part in _PARTS.findall(name)} & WORDS.keys()):
            if not any(folder in place and known == word for folder, known in ALLOWED):
                yield f"{place}: {name}: {word} -> {WORDS[word]}"
        folder, better = NAMES.get(name, ("", ""))
        if better and folder in place:
            yield f"{place}: {name} -> {better}"


def test_renamed_words_stay_away() -> None:
    found = []
    for path in _files():
        found += _faults(path.relative_to(ROOT).as_posix(), _names(path.read_text(encoding="utf-8"), path.suffix))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "suffix", "found"),
    [
        ("def run(products): pass", ".py", ["products"]),
        ("class MatmulEnding: pass", ".py", ["MatmulEnding"]),
        ("_TOLD = 1  # a comment is told", ".py", ["_TOLD"]),
        ("import itertools\nfor a, b in itertools.product(x, y): 'product'", ".py", []),
        ("from itertools import product\nproduct(x)", ".py", []),
        ("production = 1; spending = 2", ".py", []),
        ("#define ENDING_GATED 1 // the product\n", ".cu", ["ENDING_GATED"]),
        ("float half_turned = 1; /* told */", ".cu", ["half_turned"]),
        ("squares = 1", ".py", ["squares"]),
    ],
)
def test_words_are_found_in_identifiers(text: str, suffix: str, found: list[str]) -> None:
    faults = list(_faults(f"src/realizar/backends/cuda/some{suffix}", _names(text, suffix)))
    assert [fault.split(": ")[1].split(" -> ")[0] for fault in faults] == found


def test_allowed_words_are_used() -> None:
    """An exception whose word is gone must go too."""
    used = {
        (folder, word)
        for path in _files()
        for folder, word in ALLOWED
        if folder in path.relative_to(ROOT).as_posix()
        and any(word in name.lower() for name in _names(path.read_text(encoding="utf-8"), path.suffix))
    }
    assert used == ALLOWED.keys()
