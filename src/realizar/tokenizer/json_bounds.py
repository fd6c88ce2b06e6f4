"""Bounds on the contents of a `tokenizer.json`, checked before the tokenizers library builds it.

The library trusts the file: a few hundred bytes of steps that expand their input fill the memory with a text of two
letters, a token of a megabyte overflows the stack, and a token id of 4 billion creates lists of that length. Real files
stay far below each bound.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from realizar.checkpoint.file_json import read_bounded
from realizar.errors import CheckpointError
from realizar.tokenizer.charsmap import CharsmapError, longest_replacement
from realizar.tokenizer.vocabulary import MAX_SPECIAL_LENGTH, why_too_long

MAX_FILE_BYTES = 64 << 20
"""The largest vocabularies known, of 262,144 tokens, take 33 MB."""
MAX_TOKENS_BEYOND_ROWS = 1024
"""Tokens whose id is beyond the model's embedding rows: some files name a few that the model never learnt."""
MAX_ADDED_BYTES = 2 << 20
"""Bytes of added tokens, with shared prefixes counted once. The automaton that finds them takes 60 times as much."""
MAX_TOKENS = 1 << 20
MAX_MERGES_PER_TOKEN = 32
MAX_STEPS = 64
MAX_PATTERN_BYTES = 16 << 10
MAX_ADDITIONS = 64
MAX_GROWTH = 1024.0
"""Bytes that normalisation and pre-tokenizing may make of one byte."""

_MAX_STEPS_BYTES = 256 << 10
_MAX_CHARSMAP_TEXT = 8 << 20
_GROWTH: Mapping[str, float] = {
    "NFC": 3,
    "NFD": 3,
    "NFKC": 11,  # U+FDFA: 3 bytes to 33
    "NFKD": 11,
    "Lowercase": 1.5,
    "BertNormalizer": 4,
    "ByteLevel": 2,
    "Metaspace": 4,
}


class _Added(msgspec.Struct):
    id: int = 0
    content: str = ""


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _File(msgspec.Struct):
    model: _Model
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")


def read_within_bounds(path: Path, rows: int | None) -> tuple[bytes, float]:
    """Read and check the file of a model with so many ids; returns its bytes, and the largest factor of normalisation.

    Raises CheckpointError where the file is not JSON of the known form, or exceeds a bound.
    """
    data = read_bounded(path, MAX_FILE_BYTES)
    try:
        file = msgspec.json.decode(data, type=_File)
        return data, _Check(path, rows).growth(file)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(path, "tokenizer", f"is malformed: {error}") from None


class _Check:
    def __init__(self, path: Path, rows: int | None) -> None:
        self._path, self._rows = path, rows

    def refuse(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(self._path, f"key '{key}'", reason)

    def growth(self, file: _File) -> float:
        count, highest = self._vocabulary(file.model)
        added = self._added(file.added_tokens)
        self._ids(count, len(added), max([highest, *(token.id for token in added)]))
        growth = 1.0
        for key, raw in (("normalizer", file.normalizer), ("pre_tokenizer", file.pre_tokenizer)):
            growth *= math.prod(self._step_growth(key, step) for step in self._steps(key, raw))
        if growth > MAX_GROWTH:
            raise self.refuse("normalizer", f"makes up to {growth:.3g} bytes of one, above {MAX_GROWTH:.0f}")
        for step in self._steps("post_processor", file.post_processor):
            self._additions(step)
        return growth

    def _vocabulary(self, model: _Model) -> tuple[int, int]:
        raw = bytes(model.vocab).lstrip()
        self._check_count("model.vocab", raw, b":[")
        if raw.startswith(b"["):
            tokens = [piece for piece, _ in msgspec.json.decode(raw, type=list[tuple[str, float]])]
            highest = len(tokens) - 1
        else:
            ids = msgspec.json.decode(raw, type=dict[str, int])
            tokens, highest = list(ids), max(ids.values(), default=-1)
        if reason := why_too_long(tokens, unigram=raw.startswith(b"[")):
            raise self.refuse("model.vocab", reason)
        merges = bytes(model.merges).count(b",")  # of a list of pairs there are two for each
        if merges > (limit := 2 * MAX_MERGES_PER_TOKEN * max(len(tokens), 256)):
            raise self.refuse("model.merges", f"{merges} parts of merges for {len(tokens)} tokens, above {limit}")
        return len(tokens), highest

    def _check_count(self, key: str, raw: bytes, marks: bytes) -> None:
        """Bound a list before it is parsed, as its items take far more memory than text. Each item has `marks`."""
        count = max(raw.count(mark) for mark in (marks[:1], marks[1:]) if mark)
        if count > 2 * MAX_TOKENS:  # tokens hold such characters too
            raise self.refuse(key, f"has some {count} tokens, above {MAX_TOKENS}")

    def _added(self, raw: msgspec.Raw) -> list[_Added]:
        self._check_count("added_tokens", bytes(raw), b"{")
        tokens = msgspec.json.decode(raw, type=list[_Added])
        for token in tokens:
            if len(token.content) > MAX_SPECIAL_LENGTH:
                reason = f"token {token.id} has {len(token.content)} characters, above {MAX_SPECIAL_LENGTH}"
                raise self.refuse("added_tokens", reason)
        size = _distinct_beginnings(token.content.encode("utf-8", "surrogatepass") for token in tokens)
        if size > MAX_ADDED_BYTES:
            raise self.refuse("added_tokens", f"they have {size} bytes, above {MAX_ADDED_BYTES}")
        return tokens

    def _ids(self, count: int, added: int, highest: int) -> None:
        known = self._rows if self._rows is not None else count + added
        if highest >= (limit := max(known, count) + MAX_TOKENS_BEYOND_ROWS):
            raise self.refuse("added_tokens", f"token number {highest} is beyond the model's {known} rows")
        if self._rows is not None and count + added > 2 * limit:
            raise self.refuse("added_tokens", f"it has {count + added} tokens for the model's {known} rows")

    def _steps(self, key: str, raw: msgspec.Raw) -> list[Mapping[str, Any]]:
        text = bytes(raw)
        if len(text) > (_MAX_CHARSMAP_TEXT if b"precompiled_charsmap" in text else _MAX_STEPS_BYTES):
            raise self.refuse(key, f"has {len(text)} bytes")
        steps = [step for step in _objects(msgspec.json.decode(text)) if isinstance(step.get("type"), str)]
        if len(steps) > MAX_STEPS:
            raise self.refuse(key, f"has {len(steps)} steps, above {MAX_STEPS}")
        return steps

    def _step_growth(self, key: str, step: Mapping[str, Any]) -> float:
        pattern = step.get("pattern")
        texts = [text for text in pattern.values() if isinstance(text, str)] if isinstance(pattern, Mapping) else []
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > MAX_PATTERN_BYTES:
            raise self.refuse(key, f"a pattern has {size} bytes, above {MAX_PATTERN_BYTES}")
        if step["type"] == "Replace" and isinstance(content := step.get("content"), str):
            written = len(content.encode("utf-8", "surrogatepass"))
            # A regular expression may have an empty match before each byte.
            is_text = isinstance(pattern, Mapping) and bool(pattern.get("String"))
            return max(1.0, written / size) if is_text else 1.0 + written
        if step["type"] == "Prepend" and len(str(step.get("prepend"))) > MAX_ADDITIONS:
            raise self.refuse(key, f"puts {len(str(step['prepend']))} characters before a text, above {MAX_ADDITIONS}")
        if step["type"] == "Precompiled":
            return self._charsmap_growth(step.get("precompiled_charsmap"))
        return _GROWTH.get(step["type"], 1.0)

    def _charsmap_growth(self, text: object) -> float:
        try:
            return max(1.0, longest_replacement(base64.b64decode(text if isinstance(text, str) else "", validate=True)))
        except (CharsmapError, binascii.Error, ValueError) as error:
            raise self.refuse("normalizer.precompiled_charsmap", f"is malformed: {error}") from None

    def _additions(self, step: Mapping[str, Any]) -> None:
        """Check that a template of added tokens contains the text once, and few ids."""
        single = step.get("single")
        if step["type"] != "TemplateProcessing" or not isinstance(single, list):
            return
        texts = [item["Sequence"] for item in single if isinstance(item, Mapping) and "Sequence" in item]
        named = step.get("special_tokens")
        ids = sum(len(token.get("ids", ())) for token in _objects(named))
        if len(single) > MAX_ADDITIONS or ids > MAX_ADDITIONS:
            raise self.refuse("post_processor", f"adds more than {MAX_ADDITIONS} tokens to a text")
        if len(texts) != 1 or not isinstance(texts[0], Mapping) or texts[0].get("id") != "A":
            raise self.refuse("post_processor", "does not hold the text once")


def _distinct_beginnings(texts: Iterable[bytes]) -> int:
    total, previous = 0, b""
    for text in sorted(texts):
        shared = next((at for at, (one, other) in enumerate(zip(previous, text, strict=False)) if one != other), None)
        total += len(text) - (min(len(previous), len(text)) if shared is None else shared)
        previous = text
    return total


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            yield item
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
