"""The rows of `architectures.py` that have agreed with transformers, and those of methods of safetensors; `make parity`
notes them in `tests/data`.

The comparison needs torch and transformers, which a plain development environment lacks. The notes let a test say there
too that a new or changed row was never compared.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from architecture_case import Form
from architectures import CASES
from parity_table.stored import METHODS, MODELS, Method

PATH = Path(__file__).parents[1] / "data" / "parity_rows.json"


STORED_ROWS = [(name, method) for name, methods in MODELS.items() for method in methods]


def digest(name: str, form: str = "") -> str:
    """The digest of a row's case, and of how a method of `METHODS` stores it; a changed one was not compared yet."""
    stored = repr(METHODS[form]) if form in METHODS else ""
    return hashlib.sha256((repr(CASES[name]) + stored).encode()).hexdigest()[:16]


def recorded() -> dict[str, str]:
    """Digest by row, `llama gguf`."""
    rows: dict[str, str] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    return rows


def record(name: str, form: Form | Method) -> None:
    """Note that a row agrees. Rows that are gone are forgotten."""
    rows = {row: value for row, value in recorded().items() if row.split()[0] in CASES}
    rows[f"{name} {form}"] = digest(name, form)
    PATH.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
