"""Parameters that several commands share. cyclopts and the nouns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from realizar.config import KVCacheDType

Model = Annotated[
    str, Parameter(help="A path, a pulled name (smollm2:135m) or a Hugging Face name (user/repo:Q4_K_M).")
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Write JSON to stdout.")]
InputLines = Annotated[Path, Parameter(name=("--input", "-i"), help="JSON lines to read; - is stdin.")]
OutputLines = Annotated[Path, Parameter(name=("--output", "-o"), help="JSON lines to write; - is stdout.")]
Threads = Annotated[int | None, Parameter(help="CPU threads; default the physical cores.")]
KVCacheType = Annotated[KVCacheDType, Parameter(name="--kv-cache-dtype", help="Element type of the KV cache.")]
ContextLength = Annotated[
    int | None, Parameter(name=("--context-length", "-c"), help="Tokens that prompt and answer may take together.")
]
