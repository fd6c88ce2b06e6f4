"""Prompts with a hole that the answer fills in: `suffix` of a request is the text after it."""

from __future__ import annotations

from realizar.server.errors import unsupported
from realizar.server.generation.prompts import Hole, check_fits
from realizar.tokenizer.tokenizer import Tokenizer


def read_hole(suffix: str, tokenizer: Tokenizer, max_tokens: int, *, add_special: bool) -> Hole:
    """The hole before a suffix. Control tokens' texts in the suffix stay text, as code may contain them.

    Raises:
        ApiError: 400; the vocabulary has no marks for it.
        ContextLengthError: the suffix has more than `max_tokens` tokens.
    """
    marks = tokenizer.fill_in
    if marks is None:
        raise unsupported("suffix", "is not supported: the model can't fill in text")
    check_fits(suffix, tokenizer, max_tokens, "suffix")
    ids = tokenizer.encode(suffix, add_special=False, parse_special=False)
    bos = (tokenizer.bos_id,) if add_special and tokenizer.add_bos and tokenizer.bos_id is not None else ()
    return Hole((*bos, marks.prefix), (marks.suffix, *ids, marks.middle))
