"""Grammars over a model's vocabulary: each is compiled once, and then followed token by token by its rows.

A row whose grammar can't go on is in error and gives no mask. No token is generated without a mask.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import NESTED_GRAMMAR, StructuredOutput
from realizar.structured.ascii_classes import ascii_classes
from realizar.structured.grammar_tokens import GrammarTokens, refusal
from realizar.structured.json_schema import FreeString, free_strings, read_schema
from realizar.structured.lark_schemas import free_strings_of_lark, prepare_lark_schemas, schema_error
from realizar.structured.regex_masks import RegexMasks, regex_masks

_LOG = logging.getLogger(__name__)
_QUOTED = re.compile(r"\n *\d+ \|")  # a numbered line of the grammar in an error, which shows those near the fault

# llguidance's bounds of time and memory: a grammar compiles within a second, and a mask takes tens of milliseconds.
_LIMITS = LLParserLimits(max_lexer_states=100_000, step_max_items=50_000, step_lexer_fuel=200_000, verbose_errors=False)


class GrammarMatcher:
    """The state of one row in its grammar. Not thread-safe.

    Attributes:
        state: also in `RegexMasks`; None where that is not known.
        ended: an id that ends the output was consumed.
        error: the reason why the row can't go on.
    """

    def __init__(
        self, matcher: LLMatcher, end_ids: frozenset[int], shared: RegexMasks | None = None,
        strings: StringPlace | None = None,
    ) -> None:  # fmt: skip
        self._matcher, self._end_ids, self._shared, self._strings = matcher, end_ids, shared, strings
        self.state = None if shared is None else shared.start
        self.ended = False
        self.error: str | None = None

    def copy(self) -> GrammarMatcher:
        """Another row in the same state, which goes on by itself."""
        strings = None if self._strings is None else copy.copy(self._strings)
        made = GrammarMatcher(self._matcher.deep_copy(), self._end_ids, self._shared, strings)
        made.state, made.ended, made.error = self.state, self.ended, self.error
        return made

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consume sampled ids, up to one that ends the output. An id that the grammar does not allow is an error."""
        for token_id in token_ids:
            if self.ended or self.error is not None:
                return
            if token_id in self._end_ids and self._matcher.is_accepting():
                self.ended = True
            elif not self._matcher.consume_token(token_id):
                self.error = _reason(self._matcher.get_error())
            elif self._shared is not None:
                self.state = self._shared.after(self.state, token_id)
            elif self._strings is not None:
                self._strings.follow(token_id)

    def fill(self, drafts: Sequence[int], out: NDArray[np.uint32]) -> None:
        """Compute the mask after what was consumed, and after each draft: uint32 [drafts + 1, words], written.

        Masks after a draft that is not allowed, or with which the grammar stops, are empty.
        """
        strings = None if drafts else self._strings
        known = None if self._shared is None or drafts else self._shared.find(self.state)
        if known is not None:
            out[0] = known
            return
        if strings is not None and strings.write(out[0]):
            return
        matcher, address, size = self._matcher, ctypes.addressof(ctypes.c_char.from_buffer(out.data)), out.strides[0]
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
        if strings is not None and not matcher.is_error():
            strings.keep(out[0])

    def check(self) -> None:
        """Check whether the grammar is stuck; llguidance itself would then allow only the end."""
        if self.error is not None:
            return
        if self._matcher.is_error():
            self.error = _reason(self._matcher.get_error())
        elif self._matcher.is_stopped() and not self._matcher.is_accepting():
            self.error = "no token can follow"


class Grammar:
    """A compiled grammar. Its matchers share their lexer's states, and masks (`shared`) where states can be told."""

    def __init__(self, first: GrammarMatcher, shared: RegexMasks | None) -> None:
        self._first, self.shared = first, shared

    def start(self, output: Sequence[int] = ()) -> GrammarMatcher:
        matcher = self._first.copy()
        matcher.advance(output)
        return matcher


class GrammarFactory:
    """Compiles grammars for one vocabulary, and computes masks of rows that follow them. Thread-safe.

    Attributes:
        num_words: of a mask.
        end_ids: ids that end an output. end_mask: uint32 [words], these alone.
    """

    def __init__(self, tokens: GrammarTokens) -> None:
        self.end_ids = frozenset(tokens.ends)
        self._vocabulary = GrammarVocabulary(tokens)
        self.num_words = tokens.num_words
        self.token_columns = TokenColumns(self._vocabulary.tokens)
        self._string_tokens = StringTokens(self._vocabulary.tokens, self.num_words)
        self.end_mask = np.zeros(self.num_words, np.uint32)
        for index in self.end_ids:
            self.end_mask[index // 32] |= np.uint32(1 << (index % 32))

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar. This takes milliseconds, and up to half a second at the limits of size.

        Raises InvalidRequestError, with the reason, where it is malformed, too large, not supported, or impossible to
        satisfy.
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
        schema = read_schema(structured.value) if structured.kind == "json_schema" else None
        text = grammar_text(structured) if schema is None else _schema_text(schema)
        matcher = LLMatcher(self._vocabulary.lltokenizer, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise self._refusal(structured, text, _reason(matcher.get_error()))
        for warning in matcher.get_grammar_warnings():
            _LOG.info("a grammar's warning: %s", _reason(str(warning)))
        is_regex = structured.kind == "regex"
        shared = regex_masks(structured.value, self._vocabulary.tokens) if is_regex else None
        names = (
            free_strings_of_lark(text) if structured.kind == "lark" else {} if schema is None else free_strings(schema)
        )
        strings = StringPlace(names, self._string_tokens) if names else None
        first = GrammarMatcher(matcher, self.end_ids, shared, strings)
        mask = matcher.compute_bitmask()
        first.check()
        if first.error is not None or not any(mask):
            raise refusal(structured, _reason(first.error or "nothing satisfies it"))
        return Grammar(first, shared)

    def _refusal(self, structured: StructuredOutput, text: str, reason: str) -> InvalidRequestError:
        if structured.kind == "nested":
            lark, nested = parts_of(structured)
            text = grammar_text(nested)
            matcher = LLMatcher(self._vocabulary.lltokenizer, text, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                return self._refusal(nested, text, _reason(matcher.get_error()))
            text, structured = lark, StructuredOutput("lark", lark)
        of_schema = schema_error(text, reason) if structured.kind == "lark" else None
        return of_schema or refusal(structured, reason)

    def fill(self, row: GrammarMatcher, drafts: Sequence[int], out: NDArray[np.uint32]) -> None:
        """Compute the allowed ids of a row and of its drafts into uint32 [drafts + 1, words].

        Masks after a draft that is not allowed are empty, and masks after a draft that ends the output are not used. A
        row whose grammar is stuck gets an `error`, and its masks are empty.
        """
        if row.ended:
            out[0], out[1:] = self.end_mask, 0
        elif row.error is None:
            row.fill(drafts, out)
        row.check()
        if row.error is not None:
            out[:] = 0
        elif not np.count_nonzero(out[0]):  # `any` takes eight times as long
            row.error = "no token can follow"


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


# `GrammarVocabulary`: a model's vocabulary in the form that llguidance expects.

# Tokens of a JSON string by their length: where so many characters may follow, all tokens up to that length are allowed
# at once. llguidance's own list has 10 and 30, so that it walks most tokens where less than 10 characters are left.
_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [*(f"{_STRING}{{1,{most}}}" for most in (1, 2, 3, 5, 8, 12, 20, 30)), f"{_STRING}+"]

_LONGEST_ENCODED = 256  # characters of a forced text that the tokenizer encodes; the rest is encoded greedily
_ENCODED_TEXTS = 1024  # that are kept


class GrammarVocabulary:
    """The bytes of all tokens, for llguidance's search of the allowed ones.

    `tokens`, `special_token_ids` and `eos_token_id` are names that llguidance reads.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, given: GrammarTokens) -> None:
        vocab_size, ends = given.vocab_size, given.ends
        known = list(given.token_bytes[:vocab_size])
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = [index for index in {*given.special_ids, *ends} if index < vocab_size]
        self.eos_token_id = ends[0]
        encode = None if given.encode_source is None else given.encode_source.load()
        self._encode = None if encode is None else functools.lru_cache(_ENCODED_TEXTS)(encode)
        wrapper: Any = self
        self.lltokenizer = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(ends), slices=_SLICES)

    def __call__(self, text: str) -> list[int]:
        """Encode a text to ids with exactly its bytes. llguidance may call this from any thread."""
        head = text[:_LONGEST_ENCODED]
        ids = self._encoded(head)
        if ids is None:
            return list(self.lltokenizer.greedy_tokenize(text))
        rest = text[_LONGEST_ENCODED:]
        return [*ids, *self.lltokenizer.greedy_tokenize(rest)] if rest else ids

    def _encoded(self, text: str) -> list[int] | None:
        """The tokenizer's ids of a text, without an added space before it; None if they don't spell the text."""
        if self._encode is None:
            return None
        try:
            encoded = self._encode(text)
        except BaseException:  # noqa: BLE001 - a panic of the tokenizers library is not an Exception
            return None
        if encoded is None:
            return None
        ids, wanted = list(encoded), text.encode()
        if any(index >= len(self.tokens) for index in ids):
            return None
        if ids and self.tokens[ids[0]] == b" " and not wanted.startswith(b" "):
            del ids[0]
        return ids if b"".join(self.tokens[index] for index in ids) == wanted else None


# Masks within strings of a JSON schema that bounds their length alone. In such a string a token may follow if it might
# follow earlier in it, and has no more characters than are left; so all its masks are made of its first one.

_QUOTE, _COLON = b'"', b":"
_SPACES = b" \t\r\n"
_UNTIL_END = re.compile(rb'[^"\\]*')
_ESCAPES = re.compile(rb"\\(u[0-9a-fA-F]{0,4}|.)?", re.DOTALL)
_INNER_BYTES = bytes(range(0x80, 0xC0))  # those of a character that are not its first
_ESCAPED = b"\\"  # in place of a name with an escape, which none of those that are looked for has
_MOST_FIRST_MASKS = 64  # of one grammar


class StringTokens:
    """The bytes of all tokens, and which of them have at most so many characters within a string that they are in."""

    def __init__(self, tokens: Sequence[bytes], num_words: int) -> None:
        self.tokens, self._num_words = tokens, num_words
        counts = (_num_characters(token) for token in tokens)
        self._lengths = np.fromiter(counts, np.uint16, len(tokens))
        self.longest = int(self._lengths.max(initial=0))
        self._fitting: dict[int, NDArray[np.uint32]] = {}

    def fitting(self, most: int) -> NDArray[np.uint32]:
        """uint32 [words], the tokens with at most so many characters before their first quotation mark."""
        if (found := self._fitting.get(most)) is None:
            bits = np.zeros(32 * self._num_words, np.bool_)
            bits[: len(self._lengths)] = self._lengths <= most
            found = self._fitting[most] = np.packbits(bits, bitorder="little").view(np.uint32)
        return found


def _num_characters(token: bytes) -> int:
    if b"\\" in token:
        token = _ESCAPES.sub(b"_", token)
    return len(token.partition(_QUOTE)[0].translate(None, _INNER_BYTES))


@dataclass(slots=True)
class StringPlace:
    """Where the output of a row stands in the strings of its JSON, all of which its grammar has allowed.

    Attributes:
        names: the strings that are free, by their names.
        first_masks: of those that are at one place of the text, with the characters that were written before.
        name: what the string says that was written last. mark: the last byte outside of strings that is no space.
        text: of the string that is being written, as far as it may be a name; None outside of strings.
        is_escape: a backslash was written of an escape.
        free: of the string that is being written, which has no escape yet. count: its characters. rest: bytes of a
            character that has more. first_mask: as of `first_masks`.
    """

    names: Mapping[bytes, FreeString]
    tokens: StringTokens
    first_masks: dict[bytes, tuple[int, NDArray[np.uint32]]] = field(default_factory=dict)
    name: bytes = b""
    mark: bytes = b""
    text: bytes | None = None
    is_escape: bool = False
    free: FreeString | None = None
    count: int = 0
    rest: bytes = b""
    first_mask: tuple[int, NDArray[np.uint32]] | None = None

    def follow(self, token_id: int) -> None:
        written = self.tokens.tokens[token_id]
        while written:
            written = self._begin(written) if self.text is None else self._go_on(written)

    def write(self, out: NDArray[np.uint32]) -> bool:
        """Write the mask, uint32 [words], if it is known."""
        if not self._makes_masks() or self.first_mask is None or self.first_mask[0] > self.count:
            return False
        np.bitwise_and(self.first_mask[1], self.tokens.fitting(self._num_left()), out=out)
        return True

    def keep(self, mask: NDArray[np.uint32]) -> None:
        """Keep a mask that was computed, uint32 [words], if others are made of it."""
        if self.free is None or not self._makes_masks():
            return
        self.first_mask = self.count, mask.copy()
        if self.free.is_one and (self.name in self.first_masks or len(self.first_masks) < _MOST_FIRST_MASKS):
            self.first_masks[self.name] = self.first_mask

    def _makes_masks(self) -> bool:
        """False also in a string that has to end: llguidance allows the end alone as the tokenizer writes it."""
        return self.free is not None and not self.rest and self._num_left() > 0

    def _num_left(self) -> int:
        """Characters that may follow in the string, or as many as a token has at the most."""
        longest, most = self.tokens.longest, None if self.free is None else self.free.most
        return longest if most is None else min(most - self.count, longest)

    def _begin(self, written: bytes) -> bytes:
        """Follow what is outside of strings, up to the quotation mark of the next; the bytes after it."""
        before, quote, after = written.partition(_QUOTE)
        self.mark = before.rstrip(_SPACES)[-1:] or self.mark
        if quote:
            self.text, self.free = b"", self.names.get(self.name) if self.mark == _COLON else None
            self.mark, self.count, self.rest = quote, 0, b""
            self.first_mask = None if self.free is None else self.first_masks.get(self.name)
        return after

    def _go_on(self, written: bytes) -> bytes:
        """Follow a string up to its end; the bytes after it."""
        if self.is_escape:
            self.is_escape, written = False, written[1:]
        found = _UNTIL_END.match(written)
        assert found is not None
        assert self.text is not None
        part, after = found[0], written[found.end() :]
        if self.free is not None:
            self._count(part)
        elif self.text != _ESCAPED:
            self.text += part
        if after[:1] == _QUOTE:
            self.name, self.text, self.free = self.text, None, None
        elif after:
            self.text, self.free, self.is_escape = _ESCAPED, None, True
        return after[1:]

    def _count(self, part: bytes) -> None:
        text = self.rest + part
        try:
            self.count += len(text.decode())
            self.rest = b""
        except UnicodeDecodeError as error:
            self.count += len(text[: error.start].decode())
            self.rest = text[error.start :]


# `TokenColumns`: the bytes of all tokens by their place, so that all tokens are followed at once.

_PART = 1 << 16  # tokens that are taken one byte further before `follow` yields


class TokenColumns:
    """Tokens, by the bytes of each id, in the order of their lengths, the longest first."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._ids = np.argsort(-lengths, kind="stable")
        ordered = lengths[self._ids]
        self._starts = np.cumsum(ordered) - ordered
        self._bytes = np.frombuffer(b"".join([tokens[index] for index in self._ids.tolist()]), np.uint8)
        self._counts = [int(np.count_nonzero(ordered > place)) for place in range(int(ordered.max(initial=0)))]

    def follow(self, steps: NDArray[np.int16], state: int, out: NDArray[np.int16]) -> Iterator[None]:
        """Write the state after each token, int16 [ids]; between the parts of the work it yields.

        `steps`, int16 [states + 1, 256], has the state after each byte; the last state goes on to itself.
        """
        states = np.full(len(self._ids), state, np.int16)
        num_done = 0
        for place, count in enumerate(self._counts):
            states[:count] = steps[states[:count], self._bytes[self._starts[:count] + place]]
            num_done += count
            if num_done >= _PART:
                num_done = 0
                yield
        states[self._counts[0] if self._counts else 0 :] = len(steps) - 1  # ids without text
        out[self._ids] = states


# `grammar_text` converts a `StructuredOutput` to the text that llguidance compiles, and bounds its size and depth.

MAX_REGEX_CHARACTERS = 64 << 10
MAX_LARK_CHARACTERS = 512 << 10  # the schemas of many tools
MAX_LARK_ALTERNATIVES = 8192  # compiling takes time quadratic in these: 0.2 s
MAX_CHOICES_CHARACTERS = 512 << 10

# White space between JSON tokens: a line break with an indentation, or one space, as small models would repeat spaces.
_WHITESPACE = r"\n {0,32}|\n\t{1,8}| "


def grammar_text(structured: StructuredOutput) -> str:
    """The grammar's text for `LLMatcher`.

    Raises:
        InvalidRequestError: the grammar is too large or too deep, or its JSON is malformed.
        ValueError: the regular expression is malformed; one line.
    """
    if structured.kind == "json_object":
        return _schema_text({"type": "object"})
    if structured.kind == "json_schema":
        return _schema_text(read_schema(structured.value))
    if structured.kind == "choice":
        return str(LLMatcher.grammar_from_lark(_choices(structured.value)))
    if structured.kind == "regex":
        _check_size("the regular expression", len(structured.value), MAX_REGEX_CHARACTERS, "characters")
        return str(LLMatcher.grammar_from_regex(ascii_classes(structured.value)))
    if structured.kind == "nested":
        lark, nested = parts_of(structured)
        return json.dumps({"grammars": [{"lark_grammar": _lark_text(lark)}, _as_nested(grammar_text(nested))]})
    return _lark_text(structured.value)


def parts_of(structured: StructuredOutput) -> tuple[str, StructuredOutput]:
    """The Lark grammar of the kind `nested`, and the grammar within; InvalidRequestError for a value of another
    form.
    """
    try:
        lark, kind, value = json.loads(structured.value)
        nested = StructuredOutput(kind, value)
    except (ValueError, TypeError, RecursionError):
        reason = "nested must be a JSON list of a Lark grammar, and the kind and value of another one"
        raise InvalidRequestError(reason, "structured") from None
    if kind == "nested" or not isinstance(lark, str):
        raise InvalidRequestError("nested must have a Lark grammar, and a grammar of another kind", "structured")
    return lark, nested


def _as_nested(text: str) -> dict[str, Any]:
    part = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return {**part, "name": NESTED_GRAMMAR}


def _compiles(lark: str) -> bool:
    return not LLMatcher.validate_grammar(lark)


def _lark_text(lark: str) -> str:
    _check_size("the Lark grammar", len(lark), MAX_LARK_CHARACTERS, "characters")
    _check_size("the Lark grammar", lark.count("|"), MAX_LARK_ALTERNATIVES, "alternatives")
    return str(LLMatcher.grammar_from_lark(prepare_lark_schemas(lark, _WHITESPACE, _compiles)))


def _schema_text(schema: dict[str, Any]) -> str:
    text = json.dumps(schema)
    return str(
        LLMatcher.grammar_from_json_schema(text, overrides={"lenient": False, "whitespace_pattern": _WHITESPACE})
    )


def _choices(text: str) -> str:
    """A Lark grammar with one terminal, so that all choices form one automaton."""
    _check_size("choice", len(text), MAX_CHOICES_CHARACTERS, "characters")
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequestError("choice must be a JSON list of strings, none of them empty", "structured")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def _check_size(what: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise InvalidRequestError(f"{what} has {size} {unit}; at most {most} are allowed", "structured")
