"""Every path, link and heading that the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
_FOLDERS = ("src", "tests", "scripts", "docs", ".ci")
_PATHS = ["/" + path.relative_to(ROOT).as_posix() for folder in _FOLDERS for path in (ROOT / folder).rglob("*")]
_PATHS += ["/" + path.name for path in ROOT.iterdir()]
_CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_WORD = re.compile(r"[\w.*{}-]+(?:/[\w.*{}-]+)*/?")
_SOURCE_FILE = re.compile(r"\w[\w-]*\.(py|cu|md|svg)")
# Words in a code span that look like a path and are not one of this repository.
_NOT_PATHS = {"bench-serve/", "user/repo"}


def _paths_named(text: str) -> set[str]:
    """Words of code spans and blocks that name a file or a folder of the repository."""
    package = {path.name for path in (ROOT / "src" / "realizar").iterdir() if path.is_dir()}
    named = set()
    for code in _CODE.findall(text):
        for word in _WORD.findall(re.sub(r"https?://\S+|(?<![\w.])/\S+", " ", code)):
            first = word.split("/")[0]
            if ("/" in word and first in package | set(_FOLDERS)) or _SOURCE_FILE.fullmatch(word.split("/")[-1]):
                named.add(word)
    return named - _NOT_PATHS


def _exists(word: str, page: Path) -> bool:
    """Relative to the page, or to any folder: a page may say once which folder it speaks of."""
    return (page.parent / word).exists() or any(path.endswith("/" + word.rstrip("/")) for path in _PATHS)


def _anchor(heading: str) -> str:
    """The fragment by which a link reaches this heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _headings(page: Path) -> set[str]:
    return {_anchor(line.lstrip("#")) for line in page.read_text().splitlines() if line.startswith("#")}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    missing = sorted(word for word in _paths_named(page.read_text()) if not _exists(word, page))
    assert not missing, f"{page.name} names what does not exist: {missing}"


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target, fragment in _LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file = (page.parent / target) if target else page
        if not file.exists() or (fragment and fragment not in _headings(file)):
            wrong.append(f"{target}#{fragment}")
    assert not wrong


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    """Tables and blocks of code are as wide as they are."""
    code_or_row = re.compile(r"```.*?```|^\|[^\n]*", re.DOTALL | re.MULTILINE)
    prose = code_or_row.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())
    wide = [number for number, line in enumerate(prose.splitlines(), 1) if len(line) > 120]
    assert not wide, f"lines over 120 characters: {wide}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = [target for target, _ in _LINK.findall(page.read_text())]
        todo += [page.parent / target for target in targets if target and "://" not in target]
    assert not [str(page) for page in _PAGES if page.resolve() not in reached | {ROOT / "CHANGELOG.md"}]


def test_a_page_that_names_a_missing_file_is_found(tmp_path: Path) -> None:
    """The rules above can fail."""
    page = tmp_path / "page.md"
    page.write_text("# A page: 1.2\n`scripts/gone.py` and `gone.cu --help`, `src/realizar/errors.py`, `/v1/models`\n")
    named = _paths_named(page.read_text())
    assert {word for word in named if not _exists(word, page)} == {"scripts/gone.py", "gone.cu"}
    assert _headings(page) == {"a-page-12"}
