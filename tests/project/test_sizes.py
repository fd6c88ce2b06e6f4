"""Files, functions and lines stay small. An exception is written down with its size, and the list only shrinks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = [path for folder in ("src", "scripts", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
CUDA = sorted((ROOT / "src").rglob("*.cu"))
WEB = [path for kind in ("js", "css", "html") for path in sorted((ROOT / "src/realizar/server/web").glob(f"*.{kind}"))]
NATIVE = "src/realizar/backends/cuda/native"

MAX_MODULES = 25
MAX_FILE_LINES = 600
MAX_TRUNK_LINES = 800  # of the few files through which every step goes, where a whole rule reads best on one page
TRUNK = ("src/realizar/scheduler/scheduler.py", "src/realizar/engine/core/engine_core.py")
LARGE_FILES: dict[str, int] = {}

MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120  # Triton's and CUDA C++'s: a kernel cut up for size reads worse than a long one
LARGE_FUNCTIONS = {
    f"{NATIVE}/attend.cu:NAME": 295,
    f"{NATIVE}/matvec.cu:multiply_matrix": 160,
}

MAX_COLUMNS = 120
WIDE_LINES = {
    "activations.cu": 3,
    "attend.cu": 13,
    "attend_heads.cu": 9,
    "attend_results.cu": 7,
    "bulk.cu": 6,
    "matvec.cu": 6,
    "matvec_gated.cu": 2,
    "matvec_residual.cu": 5,
    "mma_sync.cu": 5,
    "mma_sync_instructions.cu": 4,
    "primitives.cu": 13,
    "repack.cu": 7,
    "weights.cu": 17,
    "wgmma.cu": 10,
    "wgmma_instructions.cu": 1,
}


@pytest.mark.parametrize("top", ["src", "tests", "scripts"])
def test_folders_are_short(top: str) -> None:
    counts = Counter(path.parent for path in PYTHON + CUDA if path.is_relative_to(ROOT / top))
    assert counts
    long = {_name(folder): count for folder, count in counts.items() if count > MAX_MODULES}
    assert not long, f"more than {MAX_MODULES} modules: {long}"


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Names and lines of functions, decorators left out; none of a file that is shorter than any limit."""
    if text.count("\n") <= MAX_FUNCTION_LINES:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def _first_letter(text: str, start: int) -> int:
    """The place of the first letter that is no white space."""
    return len(text) - len(text[start:].lstrip())


def _cuda_functions(text: str) -> Iterator[tuple[str, int]]:
    """Names and lines of functions: blocks of the outermost level that an argument list precedes."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S)
    code = re.sub(r"^#[^\n]*(?:\\\n[^\n]*)*", lambda found: re.sub(r"[^\n]", " ", found[0]), code, flags=re.M)
    depth, head = 0, 0
    for place, letter in enumerate(code):
        if letter == "{":
            if depth == 0:
                begin = place
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                called = re.findall(r"(\w+)\s*\(", code[head:begin])
                if called:
                    yield called[-1], code.count("\n", _first_letter(code, head), place) + 1
                head = place + 1
        elif letter == ";" and depth == 0:
            head = place + 1


def _too_large(sizes: Iterator[tuple[str, int]], limit: int) -> dict[str, int]:
    return {name: size for name, size in sizes if size > limit}


def _check(found: dict[str, int], exceptions: dict[str, int]) -> None:
    grown = {name: size for name, size in found.items() if size > exceptions.get(name, 0)}
    assert not grown, f"over the limit, or larger than the exception allows: {grown}"
    needless = sorted(set(exceptions) - set(found))
    assert not needless, f"take these out of the list of exceptions: {needless}"


def test_files() -> None:
    sizes = {_name(path): len(path.read_text().splitlines()) for path in (*PYTHON, *CUDA, *WEB)}
    trunk = [(name, sizes.pop(name)) for name in TRUNK]
    _check(_too_large(iter(trunk), MAX_TRUNK_LINES) | _too_large(iter(sizes.items()), MAX_FILE_LINES), LARGE_FILES)


def test_functions() -> None:
    found: dict[str, int] = {}
    for path in PYTHON:
        limit = MAX_KERNEL_LINES if "backends/cuda/kernels/" in _name(path) else MAX_FUNCTION_LINES
        found |= {f"{_name(path)}:{name}": n for name, n in _python_functions(path.read_text()) if n > limit}
    for path in CUDA:
        found |= {f"{_name(path)}:{name}": n for name, n in _cuda_functions(path.read_text()) if n > MAX_KERNEL_LINES}
    _check(found, LARGE_FUNCTIONS)


def test_columns_of_cuda_files() -> None:
    """Those of Python files are ruff's."""
    wide = ((path.name, sum(len(line) > MAX_COLUMNS for line in path.read_text().splitlines())) for path in CUDA)
    _check(_too_large(wide, 0), WIDE_LINES)


@pytest.mark.parametrize(("size", "exceptions"), [(121, {}), (130, {"f": 129}), (0, {"f": 129})])
def test_growth_and_needless_exceptions_are_found(size: int, exceptions: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        _check({"f": size} if size else {}, exceptions)
    _check({"f": 125}, {"f": 129})


def test_functions_of_cuda_are_measured() -> None:
    text = "#define A(x) \\\n  { x }\nstruct S { int f(int a) {\n return a; } };\n// {\n"
    text += "template <int N>\nvoid g(int a)\n{\n}\n"
    assert list(_cuda_functions(text)) == [("g", 4)]
