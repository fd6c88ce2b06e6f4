"""Translation of the tokenizers library's errors to ours. Standard library only.

The library raises bare `Exception`. A panic of its Rust code becomes `pyo3_runtime.PanicException`, which is not an
`Exception`, so no other handler would catch it. A panic's lines on stderr can't be suppressed, because they are written
before Python gets control.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from realizar.errors import CheckpointError, InvalidRequestError, RealizarError


@contextmanager
def reading(path: str | os.PathLike[str], where: str, reason: str = "is malformed") -> Iterator[None]:
    """Translate errors of calls that build a vocabulary to a `CheckpointError` of `reason` and the library's
    message.
    """
    try:
        yield
    except BaseException as error:
        ours = isinstance(error, RealizarError | MemoryError) or not isinstance(error, Exception)
        if ours and not _is_panic(error):
            raise
        raise CheckpointError(path, where, f"{reason}: {_words(error)}") from None


@contextmanager
def encoding() -> Iterator[None]:
    """Translate errors of calls that encode a text to `InvalidRequestError`."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not _is_panic(error):  # any other is a bug of ours
            raise
        raise InvalidRequestError(f"the tokenizer fails on this text: {_words(error)}") from None


def _is_panic(error: BaseException) -> bool:
    return type(error).__module__ == "pyo3_runtime"


def _words(error: BaseException) -> str:
    return ascii(" ".join(str(error).split())[:200])[1:-1] or type(error).__name__
