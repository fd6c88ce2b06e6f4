"""Every field of a record is read somewhere: what nobody reads is dead, or was forgotten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "realizar"
# Records of the API: clients write or read their fields, and all that is not read
# is refused by name (server/http/body.py).
WIRE = (
    PACKAGE / "server" / "generation" / "prompt_read.py",
    *(PACKAGE / "server" / name / "records.py" for name in ("openai", "anthropic", "ollama", "responses")),
)
# Records that leave as a whole, and why.
WHOLE = {
    ("AttendKernel", "norm_bias"): "all fields are macros of a source",
    ("AttendKernel", "value_norm"): "all fields are macros of a source",
    ("BlockCounts", "cached"): "an audit compares two counts",
    ("ChoiceShape", "selects"): "all fields are macros of a source",
    ("MatvecTiles", "unroll"): "all fields are macros of a source",
}
_BUILTIN = {name for kind in (str, bytes, list, dict, set, tuple, int, Path) for name in dir(kind)}


def _modules(*folders: Path) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def _names_read(tree: ast.Module) -> set[str]:
    """Attributes that are read; one that is called and could be a builtin's method is none of a record.

    Where a module calls `getattr`, its texts may be names of fields.
    """
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and not (node.attr in _BUILTIN and id(node) in called)
    }
    if any(isinstance(node, ast.Name) and node.id == "getattr" for node in ast.walk(tree)):
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        names |= {value for value in constants if isinstance(value, str)}
    return names


def _is_record(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    return bool(bases & {"Struct", "NamedTuple"}) or any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def _fields(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and _is_record(node):
            for item in node.body:
                if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
                    continue
                if item.value is None or "Sampler(" not in ast.unparse(item.value):  # it has a line of `SAMPLERS`
                    yield node.name, item.target.id


def test_every_field_is_read() -> None:
    read: set[str] = set()
    fields: set[tuple[str, str]] = set()
    for path, tree in _modules(PACKAGE, ROOT / "scripts"):
        read |= _names_read(tree)
        if PACKAGE in path.parents and not {path, *path.parents} & set(WIRE):
            fields |= set(_fields(tree))
    assert len(fields) > 800
    assert {field for field in fields if field[1] not in read} == set(WHOLE)


def test_what_is_only_written_is_not_read() -> None:
    """The rule above can fail."""
    tree = ast.parse(
        "@dataclass\nclass A:\n    used: int\n    split: int\n    dead: int\n    named: int\n"
        "a.dead = a.used\n'x'.split()\nother = ('named',)\n"
    )
    assert list(_fields(tree)) == [("A", "used"), ("A", "split"), ("A", "dead"), ("A", "named")]
    assert {name for _, name in _fields(tree)} - _names_read(tree) == {"split", "dead", "named"}
    assert "named" in _names_read(ast.parse("getattr(a, name)\nother = ('named',)"))
