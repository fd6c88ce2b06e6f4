"""Dotted names in texts lead to modules: a reader would look for one that was moved in vain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Dotted names that begin as a package does: keys of GGUF's metadata and of OpenTelemetry, and other libraries.
_KEYS = ("tokenizer.ggml.", "http.re", "cuda.bindings", "ray.")
_DOTTED = re.compile(r"`(?:realizar\.)?([a-z_]+(?:\.[A-Za-z_]+)+)`")
_FILES = re.compile(r"\.(?:py|cu|js|md|json|jinja|toml)$")
_SUFFIXES = (".py", ".cu", ".js", ".md")


def _texts() -> Iterator[Path]:
    """Sources, tests and documentation, but for the log, which says how things were called then."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    for folder in ("src/realizar", "scripts", "tests", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            is_ours = path.suffix in _SUFFIXES and path != Path(__file__) and path.parent.name != "vendor"
            if is_ours and ROOT / "docs/log" not in path.parents:
                yield path


@cache
def _members() -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
    """Names of packages; pairs of a package and a member, and for modules of a package's name of them and a word."""
    modules = [path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src/realizar").rglob("*.py")]
    packages = {module.parent for module in modules} - {Path("realizar")}
    names = frozenset(package.name for package in packages)
    within = {(member.parent.name, member.name) for member in (*modules, *packages)}
    for module in modules:
        if module.name in names:
            text = (ROOT / "src" / module).with_suffix(".py").read_text(encoding="utf-8")
            within |= {(module.name, word) for word in re.findall(r"\w+", text)}
    return names, frozenset(within)


def _gone(text: str) -> list[str]:
    """Dotted names that begin with a package's name, and whose second part nothing of that name has."""
    packages, within = _members()
    found = []
    for name in _DOTTED.findall(text):
        package, member, *_ = name.split(".")
        is_other = name.startswith(_KEYS) or _FILES.search(name) is not None
        if package in packages and (package, member) not in within and not is_other:
            found.append(name)
    return found


def test_dotted_names_lead_to_modules() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}" for path in _texts() for name in _gone(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("started by `engine.supervisor` or `realizar.engine.supervisor`", ["engine.supervisor", "engine.supervisor"]),
        ("`engine.process.supervisor`, `layouts.activations.half_order`, `realizar.engine`", []),
        ("the key `tokenizer.ggml.pre`, `torch.cuda.graph`, `models.py`, `scheduler.py`", []),
    ],
)
def test_dotted_names_that_lead_nowhere_are_found(text: str, names: list[str]) -> None:
    assert _gone(text) == names
