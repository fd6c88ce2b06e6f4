"""The table of hops in docs/architecture.md: few records, each where the table says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

_ROOT = Path(__file__).parents[2]
_SOURCE = _ROOT / "src" / "realizar"
_PAGE = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| \d+ \| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)
_PATH = re.compile(r"`([\w/]+\.py)`")


class Hop(NamedTuple):
    """A line of the table: a record, and the files that define, make and read it; the client reads the last."""

    record: str
    defined: list[str]
    made: list[str]
    read: list[str]
    for_client: bool


def hops(page: str) -> list[Hop]:
    table = page.partition("## From HTTP body to kernel and back")[2].partition("\n## ")[0]
    return [Hop(record, *map(_PATH.findall, cells), cells[2] == "the client") for record, *cells in _ROW.findall(table)]


def fault(hop: Hop) -> str | None:
    """The fault of the table's row of a record, or None."""
    if len(hop.defined) != 1 or not hop.made or not (hop.read or hop.for_client):
        return f"{hop.record} has no file in a column"
    for path in (*hop.defined, *hop.made, *hop.read):
        if not (_SOURCE / path).is_file():
            return f"there is no {path}"
    if not any(isinstance(node, ast.ClassDef) and node.name == hop.record for node in ast.walk(_tree(hop.defined[0]))):
        return f"{hop.defined[0]} does not define {hop.record}"
    for path in (*hop.made, *hop.read):
        if hop.record not in _names(_tree(path)):
            return f"{path} has no use for {hop.record}"
    return None


def _tree(path: str) -> ast.Module:
    return ast.parse((_SOURCE / path).read_text(encoding="utf-8"))


def _names(tree: ast.Module) -> set[str]:
    """Names that a module uses or defines, beside those that it only imports."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_few_records_lead_from_the_body_to_the_kernel_and_back() -> None:
    names = [hop.record for hop in hops(_PAGE)]
    assert len(names) >= 10
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("hop", hops(_PAGE), ids=lambda hop: hop.record)
def test_each_record_is_where_the_table_says(hop: Hop) -> None:
    assert fault(hop) is None


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ("`Request` | `request.py` | `engine/frontend/prepare.py` | `scheduler/scheduler.py`", None),
        ("`Requests` | `request.py` | `engine/frontend/prepare.py` | `scheduler/scheduler.py`", "does not define"),
        ("`Request` | `request.py` | `engine/gone.py` | `scheduler/scheduler.py`", "there is no"),
        ("`Request` | `request.py` | `sizes.py` | `scheduler/scheduler.py`", "has no use"),
        ("`Request` | `request.py` | nowhere | `scheduler/scheduler.py`", "no file"),
    ],
)
def test_what_is_wrong_in_the_table_is_found(cells: str, reason: str | None) -> None:
    (hop,) = hops(f"## From HTTP body to kernel and back\n\n| 1 | {cells} |\n")
    found = fault(hop)
    assert found is None if reason is None else found is not None and reason in found
