"""Parameters that several commands share. cyclopts and the nouns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Model = Annotated[
    str, Parameter(help="A path, a pulled name (smollm2:135m) or a Hugging Face name (user/repo:Q4_K_M).")
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Write JSON to stdout.")]
InputLines = Annotated[Path, Parameter(name=("--input", "-i"), help="JSON lines to read; - is stdin.")]
OutputLines = Annotated[Path, Parameter(name=("--output", "-o"), help="JSON lines to write; - is stdout.")]
