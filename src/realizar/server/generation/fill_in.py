"""Prompts with a hole that the answer fills in: `suffix` of a request is the text after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realizar.server.errors import unsupported
from realizar.server.generation.prompts import Prompt, check_fits
from realizar.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Hole:
    """The ids around a prompt that make it the text before a hole, in the order prefix, suffix, middle.

    Attributes:
        before: BOS if the model wants one, and the mark of the prefix.
        after: the mark of the suffix, the suffix, and the mark of the middle.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    def around(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with these ids around each."""
        return [Prompt((*self.before, *prompt.token_ids, *self.after), prompt.text) for prompt in prompts]


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
