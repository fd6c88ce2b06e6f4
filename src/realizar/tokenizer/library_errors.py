"""What the tokenizers library raises, as errors of ours: the one boundary. Standard library only.

The library raises bare `Exception`. Where its Rust code panics it raises `pyo3_runtime.PanicException`, which is not an
`Exception`, so nothing else here would catch it. A panic's own lines on stderr can't be held back: they are written
before Python knows of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from realizar.errors import CheckpointError, InvalidRequestError, RealizarError


@contextmanager
def reading(path: str | os.PathLike[str], where: str, reason: str = "is malformed") -> Iterator[None]:
    """Around calls that build a vocabulary from a file.

    Args:
        path, where: of the `CheckpointError` that is raised in place of the library's.
        reason: what it says before the library's own words.
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
    """Around calls that encode a text: an error is the text's, `InvalidRequestError`."""
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
