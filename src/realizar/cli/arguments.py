"""Parameters that several commands share. cyclopts and the nouns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token

from realizar.config import KVCacheDType


def exact_integer(_type: Any, tokens: Sequence[Token]) -> int:
    """An integer as written: cyclopts by itself would round 1.5 to 2."""
    return int(tokens[0].value)


Model = Annotated[
    str, Parameter(help="A path, a pulled name (smollm2:135m) or a Hugging Face name (user/repo:Q4_K_M).")
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Write JSON to stdout.")]
InputLines = Annotated[
    Path, Parameter(name=("--input", "-i"), allow_leading_hyphen=True, help="JSON lines to read; - is stdin.")
]
OutputLines = Annotated[
    Path, Parameter(name=("--output", "-o"), allow_leading_hyphen=True, help="JSON lines to write; - is stdout.")
]
Integer = Annotated[int, Parameter(converter=exact_integer)]
MaybeInteger = Annotated[int | None, Parameter(converter=exact_integer)]
Threads = Annotated[MaybeInteger, Parameter(help="CPU threads; default the physical cores.")]
KVCacheType = Annotated[KVCacheDType, Parameter(name="--kv-cache-dtype", help="Element type of the KV cache.")]
