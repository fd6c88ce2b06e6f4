"""The vocabulary of a GGUF file (`tokenizer.ggml.*`), read and checked. numpy only.

Key names and defaults are those of the GGUF specification and llama.cpp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, TokenizerError
from realizar.tokenizer.charsmap import CharsmapError, longest_replacement

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
_PREFIX = "tokenizer.ggml."
MAX_SPECIAL_LENGTH = 256
"""Characters of a special token, which is searched in every text. Known ones have 30; the search time grows with it."""
MAX_TOKEN_LENGTH = 1024
MAX_VOCABULARY_CHARACTERS = 6 << 20
MAX_UNIGRAM_CHARACTERS = 2 << 20
"""Bounds of one token and of all tokens. Known vocabularies have 512 and 2 million, unigram ones 1.5 million. Unigram's
trie takes 300 bytes for each character, and a token of a million characters overflows its stack."""
MERGED_MODELS = ("gpt2", "gemma4", "whitespace")
"""The kinds of vocabularies that have merges."""
_MODELS = (*MERGED_MODELS, "llama", "t5", "bert")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MATCHED_WHOLE = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checked vocabulary.

    Attributes:
        path: the file, for messages.
        model: `gpt2`, `gemma4`, `whitespace` (byte-pair with merges), `llama` (by score), `t5` (unigram), `bert`.
        pre: name of the pre-tokenizer; `default` if the file has none.
        tokens: text by id; no two are equal. ids: id by text.
        types: int32 [tokens], of `TokenType`. scores: float32 [tokens].
        merges: pairs of texts in order of rank; empty if the model has none.
        special: `bos`, `eos`, `eot`, `eom`, `unknown`, `separator`, `padding`, `mask`, `fim_*` -> id, if the file has
            it.
        flags: the file's `add_bos_token`, `add_eos_token`, `add_space_prefix`, ...
        charsmap: SentencePiece's compiled normalisation, or empty.
        name, architecture: `general.*`.
    """

    path: Path
    model: str
    pre: str
    tokens: Sequence[str]
    ids: Mapping[str, int]
    types: NDArray[np.int32]
    scores: NDArray[np.float32]
    merges: Sequence[tuple[str, str]]
    special: Mapping[str, int]
    flags: Mapping[str, bool]
    charsmap: bytes
    name: str
    architecture: str


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Read the vocabulary from a GGUF file's metadata.

    Raises:
        TokenizerError: the vocabulary is missing or of an unknown kind.
        CheckpointError: its lists disagree, or name tokens that do not exist.
    """
    return _Reader(checkpoint.path, checkpoint.metadata).vocabulary()


def why_too_long(tokens: Sequence[str], *, unigram: bool) -> str | None:
    """The reason why a vocabulary's tokens are too long; None if they are not."""
    most = MAX_UNIGRAM_CHARACTERS if unigram else MAX_VOCABULARY_CHARACTERS
    lengths = list(map(len, tokens))
    longest, total = max(lengths, default=0), sum(lengths)
    if longest > MAX_TOKEN_LENGTH:
        return f"token {lengths.index(longest)} has {longest} characters, above {MAX_TOKEN_LENGTH}"
    if total > most:
        return f"its tokens have {total} characters, above {most}"
    return None


class _Reader:
    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, metadata

    def refuse(self, key: str, reason: str) -> NoReturn:
        raise CheckpointError(self.path, f"key '{key}'", reason)

    def vocabulary(self) -> Vocabulary:
        model = self._model()
        tokens = self._tokens(model)
        ids = {text: index for index, text in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(text for index, text in enumerate(tokens) if ids[text] != index)
            self.refuse(_PREFIX + "tokens", f"token {twice!r} appears twice")
        return Vocabulary(
            path=self.path,
            model=model,
            pre="gemma4" if model == "gemma4" else self._text(_PREFIX + "pre") or "default",
            tokens=tokens,
            ids=ids,
            types=self._types(tokens),
            scores=self._scores(len(tokens)),
            merges=self._merges() if model in MERGED_MODELS else (),
            special=self._special(len(tokens)),
            flags=self._flags(),
            charsmap=self._charsmap(),
            name=self._text("general.name"),
            architecture=self._text("general.architecture"),
        )

    def _model(self) -> str:
        model = self.metadata.get(_PREFIX + "model")
        if model in (None, "no_vocab", "none"):
            found = "no tokenizer.ggml.model" if model is None else f"tokenizer.ggml.model is {model!r}"
            raise TokenizerError(f"{self.path} has no vocabulary ({found})")
        if model not in _MODELS:
            raise TokenizerError(f"{self.path}: tokenizer.ggml.model {model!r} is not supported")
        return str(model)

    def _tokens(self, model: str) -> list[str]:
        key = _PREFIX + "tokens"
        tokens = self._strings(key, f"vocabulary (no {key})")
        if not tokens:
            self.refuse(key, "is not a list of strings")
        if reason := why_too_long(tokens, unigram=model == "t5"):
            self.refuse(key, reason)
        if "" in tokens:
            return [text or f"[EMPTY_{index}]" for index, text in enumerate(tokens)]
        return tokens

    def _types(self, tokens: Sequence[str]) -> NDArray[np.int32]:
        values = self._numbers("token_type", len(tokens))
        if values is None:
            return np.full(len(tokens), TokenType.NORMAL, np.int32)
        key = _PREFIX + "token_type"
        unknown = ~np.isin(values, [kind.value for kind in TokenType])
        if unknown.any():
            index = int(unknown.argmax())
            self.refuse(key, f"token {index} is of type {values[index]}, which is unknown")
        for index in np.flatnonzero(np.isin(values, _MATCHED_WHOLE)).tolist():
            if len(tokens[index]) > MAX_SPECIAL_LENGTH:
                reason = f"special token {index} has {len(tokens[index])} characters, above {MAX_SPECIAL_LENGTH}"
                self.refuse(key, reason)
        return values.astype(np.int32)

    def _scores(self, count: int) -> NDArray[np.float32]:
        values = self._numbers("scores", count)
        if values is None:
            return np.zeros(count, np.float32)
        if values.dtype.kind == "f" and np.isnan(values).any():
            self.refuse(_PREFIX + "scores", "holds NaN")
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinities, which have a rank too
            return values.astype(np.float32)

    def _numbers(self, name: str, count: int) -> NDArray[Any] | None:
        """The file's numbers for each token; None if it has none."""
        key = _PREFIX + name
        values = self.metadata.get(key)
        if values is None:
            return None
        values = np.asarray(values)
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            self.refuse(key, "is not a list of numbers")
        if len(values) != count:
            self.refuse(key, f"has {len(values)} entries for {count} tokens")
        return values

    def _strings(self, key: str, what: str) -> list[str]:
        """The list of a key that has to be there; `what` the file has not where it is missing."""
        lines = self.metadata.get(key)
        if lines is None:
            raise TokenizerError(f"{self.path} has no {what}")
        if not isinstance(lines, list) or (lines and not isinstance(lines[0], str)):
            self.refuse(key, "is not a list of strings")
        return lines

    def _merges(self) -> list[tuple[str, str]]:
        key = _PREFIX + "merges"
        lines = self._strings(key, f"merges ({key})")
        merges: list[tuple[str, str]] = []
        for rank, line in enumerate(dict.fromkeys(lines)):  # the first of equal merges counts
            left, space, right = line.partition(" ")
            if not space:
                self.refuse(key, f"merge {rank}, {line!r}, is not a pair")
            merges.append((left, right))
        return merges

    def _special(self, count: int) -> dict[str, int]:
        special: dict[str, int] = {}
        for name, keys in _SPECIAL_KEYS.items():
            for stem in keys:
                key = f"{_PREFIX}{stem}_token_id"
                value = self._value(key, int, "which is not an id")
                if value is None:
                    continue
                if 0 <= value < count:
                    special[name] = value
                elif value == _NO_TOKEN or (name in _UNUSED_IN_ANSWERS and value >= 0):
                    _LOG.warning(
                        "%s: key '%s' is %d, beyond the %d tokens; it is left out", self.path, key, value, count
                    )
                else:
                    self.refuse(key, f"is {value}, beyond the {count} tokens")
        return special

    def _flags(self) -> dict[str, bool]:
        values = {name: self._value(_PREFIX + name, bool, "neither true nor false") for name in _FLAGS}
        return {name: value for name, value in values.items() if value is not None}

    def _value(self, key: str, kind: type[_T], otherwise: str) -> _T | None:
        value = self.metadata.get(key)
        if value is not None and type(value) is not kind:
            self.refuse(key, f"is {value!r}, {otherwise}")
        return value

    def _charsmap(self) -> bytes:
        key = _PREFIX + "precompiled_charsmap"
        value = self.metadata.get(key)
        if value is None:
            return b""
        values = np.asarray(value)
        if values.ndim != 1 or values.dtype.kind not in "iu" or values.dtype.itemsize != 1:
            self.refuse(key, "is not a list of bytes")
        charsmap = values.tobytes()
        if charsmap:
            try:
                longest_replacement(charsmap)
            except CharsmapError as error:
                self.refuse(key, f"is malformed: {error}")
        return charsmap

    def _text(self, key: str) -> str:
        value = self.metadata.get(key, "")
        if not isinstance(value, str):
            self.refuse(key, "is not text")
        return value


# Later names win: the old `prefix`, `suffix` and `middle` come last, as in llama.cpp.
_SPECIAL_KEYS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "mask", "fim_pad")},
    "separator": ("seperator",),
    "fim_prefix": ("fim_pre", "prefix"),
    "fim_suffix": ("fim_suf", "suffix"),
    "fim_middle": ("fim_mid", "middle"),
    "fim_repo": ("fim_rep",),
    "fim_separator": ("fim_sep",),
}
# Left out, as in llama.cpp, where they lie beyond the vocabulary; models that need an unknown token say so.
_UNUSED_IN_ANSWERS = ("unknown", "padding", "mask")
_NO_TOKEN = (1 << 32) - 1  # -1 in 32 bits
_FLAGS = (
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    "remove_extra_whitespaces",
    "normalizer.lowercase",
    "normalizer.strip_accents",
)
