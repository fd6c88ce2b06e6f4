"""Grammars over a model's vocabulary: each is compiled once, and then followed token by token by its rows.

A row whose grammar can't go on is in error and gives no mask. No token is generated without a mask.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_text import grammar_text, parts_of
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.kind_names import refusal
from realizar.structured.lark_schemas import schema_error
from realizar.structured.regex_masks import regex_masks
from realizar.structured.state_masks import StateMasks
from realizar.structured.token_columns import TokenColumns
from realizar.structured.vocabulary import GrammarVocabulary

_LOG = logging.getLogger(__name__)
_QUOTED = re.compile(r"\n *\d+ \|")  # a numbered line of the grammar in an error, which shows those near the fault

# llguidance's bounds of time and memory: a grammar compiles within a second, and a mask takes tens of milliseconds.
_LIMITS = LLParserLimits(max_lexer_states=100_000, step_max_items=50_000, step_lexer_fuel=200_000, verbose_errors=False)


class GrammarMatcher:
    """The state of one row in its grammar. Not thread-safe.

    Attributes:
        error: the reason why the row can't go on, or None.
        state: see `StateMasks`; None where it is not known.
    """

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], shared: StateMasks[Any] | None = None) -> None:
        self._matcher, self._end_ids, self._shared = matcher, end_ids, shared
        self.state: Any = None if shared is None else shared.start
        self._ended = False
        self.error: str | None = None

    def copy(self) -> GrammarMatcher:
        """Another row in the same state, which goes on by itself."""
        made = GrammarMatcher(self._matcher.deep_copy(), self._end_ids, self._shared)
        made.state, made._ended, made.error = self.state, self._ended, self.error
        return made

    @property
    def ended(self) -> bool:
        """True once an id that ends the output was consumed."""
        return self._ended

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consume chosen ids. An id that the grammar does not allow, or an id after the end, is an error of the row."""
        for token_id in token_ids:
            if self.error is not None:
                return
            if self._ended:
                self.error = "a token follows the end"
            elif token_id in self._end_ids and self._matcher.is_accepting():
                self._ended = True
            elif not self._matcher.consume_token(token_id):
                self.error = _reason(self._matcher.get_error())
            elif self._shared is not None:
                self.state = self._shared.after(self.state, token_id)

    def fill(self, drafts: Sequence[int], out: NDArray[np.uint32]) -> None:
        """Compute the mask after what was consumed, and after each draft: uint32 [drafts + 1, words], written.

        Masks after a draft that is not allowed, or with which the grammar stops, are empty.
        """
        known = None if self._shared is None or drafts else self._shared.find(self.state)
        if known is not None:
            out[0] = known
            return
        matcher, (address, size) = self._matcher, (out.ctypes.data, out.strides[0])
        matcher.unsafe_compute_mask_ptr(address, size)
        num_consumed = 0
        for draft in drafts:
            if matcher.is_stopped() or not matcher.try_consume_tokens([draft]):
                break
            num_consumed += 1
            matcher.unsafe_compute_mask_ptr(address + num_consumed * size, size)
        if num_consumed:
            matcher.rollback(num_consumed)
        out[num_consumed + 1 :] = 0
        if self._shared is not None and not matcher.is_error():
            self._shared.keep(self.state, out[0])

    def check(self) -> None:
        """Check whether the grammar is stuck; llguidance itself would then allow only the end."""
        if self.error is not None:
            return
        if self._matcher.is_error():
            self.error = _reason(self._matcher.get_error())
        elif self._matcher.is_stopped() and not self._matcher.is_accepting():
            self.error = "no token can follow"


class Grammar:
    """A compiled grammar. Its matchers share their lexer's states, and masks where states can be told.

    Attributes:
        shared: masks by state; None where states can't be told.
    """

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int], shared: StateMasks[Any] | None = None) -> None:
        self._matcher, self._end_ids, self.shared = matcher, end_ids, shared

    def start(self, output: Sequence[int] = ()) -> GrammarMatcher:
        """Make a matcher at the grammar's begin, or after some output."""
        matcher = GrammarMatcher(self._matcher.deep_copy(), self._end_ids, self.shared)
        matcher.advance(output)
        return matcher


class GrammarFactory:
    """Compiles grammars for one vocabulary, and computes masks of rows that follow them. Thread-safe.

    Attributes:
        num_words: of a mask.
        end_ids: ids that end an output. end_mask: uint32 [words], these alone.
        token_columns: the bytes of all ids.
    """

    def __init__(self, tokens: GrammarTokens) -> None:
        self.end_ids = frozenset(tokens.ends)
        self._vocabulary = GrammarVocabulary(tokens)
        self.num_words = tokens.num_words
        self.token_columns = TokenColumns(self._vocabulary.tokens)
        self.end_mask = np.zeros(self.num_words, np.uint32)
        for index in self.end_ids:
            self.end_mask[index // 32] |= np.uint32(1 << (index % 32))

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar. This takes milliseconds, and up to half a second at the limits of size.

        Raises:
            InvalidRequestError: the grammar is malformed, too large, not supported, or impossible to satisfy; the
                message gives the reason.
        """
        try:
            return self._compile(structured)
        except RealizarError:
            raise
        except RecursionError:
            reason = "it is nested too deep"
        except MemoryError:
            reason = "it takes too much memory"
        except ValueError as error:
            reason = str(error)
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance is not an Exception; it must stop here
            reason = f"reading it failed with {type(error).__name__}: {error}"
        raise refusal(structured, _reason(reason))

    def _compile(self, structured: StructuredOutput) -> Grammar:
        text = grammar_text(structured)
        matcher = LLMatcher(self._vocabulary.lltokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise self._refusal(structured, text, _reason(matcher.get_error()))
        for warning in matcher.get_grammar_warnings():
            _LOG.info("a grammar's warning: %s", _reason(str(warning)))
        first = GrammarMatcher(matcher, self.end_ids)
        mask = matcher.compute_bitmask()
        first.check()
        if first.error is not None or not any(mask):
            raise refusal(structured, _reason(first.error or "nothing satisfies it"))
        return Grammar(matcher, self.end_ids, self._shared_masks(structured))

    def _refusal(self, structured: StructuredOutput, text: str, reason: str) -> InvalidRequestError:
        """The error of a grammar that does not compile; it names the part that is at fault."""
        if structured.kind == "nested":
            lark, nested = parts_of(structured)
            text = grammar_text(nested)
            matcher = LLMatcher(self._vocabulary.lltokenizer, text, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                return self._refusal(nested, text, _reason(matcher.get_error()))
            text, structured = lark, StructuredOutput("lark", lark)
        of_schema = schema_error(text, reason) if structured.kind == "lark" else None
        return of_schema or refusal(structured, reason)

    def _shared_masks(self, structured: StructuredOutput) -> StateMasks[Any] | None:
        """The masks that rows of the grammar share; None where states can't be told apart."""
        if structured.kind == "regex":
            return regex_masks(structured.value, self._vocabulary.tokens)
        return None

    def masks(self, rows: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[NDArray[np.uint32]]:
        """Compute the allowed ids of rows and of their drafts: uint32 [drafts + 1, words] for each row. See `fill`."""
        found = [np.empty((len(drafts) + 1, self.num_words), np.uint32) for _, drafts in rows]
        for (row, drafts), out in zip(rows, found, strict=True):
            self.fill(row, drafts, out)
        return found

    def fill(self, row: GrammarMatcher, drafts: Sequence[int], out: NDArray[np.uint32]) -> None:
        """Compute the allowed ids of a row and of its drafts.

        Masks after a draft that is not allowed are empty, and masks after a draft that ends the output are not used. A
        row whose grammar is stuck gets an `error`, and its masks are empty.

        Args:
            out: uint32 [drafts + 1, words], written.
        """
        if row.ended:
            out[0], out[1:] = self.end_mask, 0
        elif row.error is None:
            row.fill(drafts, out)
        row.check()
        if row.error is not None:
            out[:] = 0
        elif not out[0].any():
            row.error = "no token can follow"

    def certain_ids(self, row: GrammarMatcher, most: int) -> list[int]:
        """The next tokens of a row that its grammar forces, before the end of its output. The row stays as it is."""
        row, found, mask = row.copy(), list[int](), np.empty((1, self.num_words), np.uint32)
        while len(found) < most:
            self.fill(row, (), mask)
            token_id = only_id(mask[0])
            if token_id is None or token_id in self.end_ids:
                break
            found.append(token_id)
            row.advance((token_id,))
        return found


def only_id(mask: NDArray[np.uint32]) -> int | None:
    """The id that a mask, uint32 [words], allows if it allows one alone, else None."""
    if np.count_nonzero(mask) != 1:
        return None
    place = int(mask.argmax())
    word = int(mask[place])
    return None if word & (word - 1) else 32 * place + word.bit_length() - 1


_WORDS = (
    ("Unimplemented keys: [", "unsupported keywords: ["),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf is supported only where no value can fit two of its schemas; use anyOf",
    ),
)
"""Words of llguidance that say nothing to a client, or name its options, and ours."""


def _reason(text: str) -> str:
    """An error of llguidance as one line, without underlines, backtraces and the grammar's own lines."""
    if "panic" in text or "backtrace" in text:
        return "it is too complex"
    lines = [line.strip() for line in _QUOTED.split(text, 1)[0].splitlines()]
    joined = " ".join(line for line in lines if line.strip("^<>") and not line.startswith("<"))
    for theirs, ours in _WORDS:
        joined = joined.replace(theirs, ours)
    return joined[:500] or "unknown"
