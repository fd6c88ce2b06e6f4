"""A package whose docstring lists its modules names all of them: a reader who goes by the list misses none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGES = sorted(path.parent for path in (_ROOT / "src" / "realizar").rglob("__init__.py"))
_NAMED = re.compile(r"`(?:[\w/]+/)?(\w+(?:\.py|\.cu|/))`")


def _members(package: Path) -> set[str]:
    """Modules, CUDA sources and packages in a folder, as texts name them."""
    found = {path.name for kind in ("py", "cu") for path in package.glob(f"*.{kind}")}
    found |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    return found - {"__init__.py", "__main__.py"}


def left_out(package: Path) -> set[str]:
    """Members that a package's docstring leaves out of its list; none where it has no list, but one name at most."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    members = _members(package)
    named = members & set(_NAMED.findall(text))
    return members - named if len(named) > 1 else set()


def test_lists_of_modules_are_whole() -> None:
    found = {package.relative_to(_ROOT).as_posix(): names for package in _PACKAGES if (names := left_out(package))}
    assert not found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`one.py`, `two.cu` and `more/`.", set()),
        ("`one.py` and `two.cu`.", {"more/"}),
        ("`one.py` and `some/more/`.", {"two.cu"}),
        ("Begin with `one.py`.", set()),
    ],
)
def test_what_a_list_leaves_out_is_found(text: str, names: set[str], tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("one.py", "two.cu", "more/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "__init__.py").write_text(f'"""A package.\n\n{text}\n"""\n')
    assert left_out(tmp_path) == names
