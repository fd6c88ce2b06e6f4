"""The rows of `architectures.py` that have agreed with transformers; `make parity` notes them in `tests/data`.

The comparison needs torch and transformers, which a plain development environment lacks. The notes let a test say there
too that a new or changed row was never compared.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from architecture_case import Form
from architectures import CASES

PATH = Path(__file__).parents[1] / "data" / "parity_rows.json"


def digest(name: str) -> str:
    """The digest of a row's case; a changed case was not compared yet."""
    return hashlib.sha256(repr(CASES[name]).encode()).hexdigest()[:16]


def recorded() -> dict[str, str]:
    """Digest by row, `llama gguf`."""
    rows: dict[str, str] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    return rows


def record(name: str, form: Form) -> None:
    """Note that a row agrees. Rows that are gone are forgotten."""
    rows = {row: value for row, value in recorded().items() if row.split()[0] in CASES}
    rows[f"{name} {form}"] = digest(name)
    PATH.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
