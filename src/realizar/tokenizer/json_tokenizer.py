"""`JSONTokenizer`: a tokenizer from a `tokenizer.json`, which the tokenizers library runs.

Its contents are checked before the library builds it, as the library trusts the file: a few hundred bytes of steps that
expand their input fill the memory with a text of two letters, a token of a megabyte overflows the stack, and a token id
of 4 billion creates lists of that length. Real files stay far below each bound.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.file_json import read_bounded
from realizar.errors import CheckpointError, InvalidRequestError
from realizar.models.dimensions import MAX_VOCABULARY
from realizar.tokenizer import library_errors
from realizar.tokenizer.byte_alphabet import spelled_bytes
from realizar.tokenizer.charsmap import CharsmapError, longest_replacement
from realizar.tokenizer.special_tokens import SpecialTokenFinder, end_texts, fill_in_ids
from realizar.tokenizer.templates.stored_templates import stored_templates
from realizar.tokenizer.tokenizer import Tokenizer
from realizar.tokenizer.tokenizers_models import BYTE_VALUES, SPACE, library_ids
from realizar.tokenizer.vocabulary import MAX_SPECIAL_LENGTH, why_too_long

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer


# Known normalisations make up to three bytes of one, except for single characters that NFKC expands.
_USUAL_GROWTH = 16
_GROWTH_FLOOR, _GROWTH_PART = 4096, 4096

_MAX_FILE_BYTES = 64 << 20
"""The largest vocabularies known, of 262,144 tokens, take 33 MB."""
_MAX_TOKENS_BEYOND_ROWS = 1024
"""Tokens whose id is beyond the model's embedding rows: some files name a few that the model never learnt."""
_MAX_ADDED_BYTES = 2 << 20
"""Bytes of added tokens, with shared prefixes counted once. The automaton that finds them takes 60 times as much."""
MAX_TOKENS = 1 << 20
_MAX_MERGES_PER_TOKEN = 32
_MAX_STEPS = 64
_MAX_PATTERN_BYTES = 16 << 10
_MAX_ADDITIONS = 64
_MAX_GROWTH = 1024.0
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


class JSONTokenizer(Tokenizer):
    """The tokenizer of a folder with `tokenizer.json`.

    Raises CheckpointError: the file is malformed, or its configuration names tokens that do not exist.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.tokenizer_path or checkpoint.path
        rows = _rows(checkpoint)
        self._library, growth = _read(path, rows)
        self._grows = growth > _USUAL_GROWTH
        added = self._library.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = {index: token.content for index, token in added.items()}
        decoder = self._library.decoder
        self._decoder = json.loads(decoder.__getstate__()) if decoder is not None else {}
        self._byte_level = _mentions(self._decoder, "ByteLevel")
        self._byte_fallback = _mentions(self._decoder, "ByteFallback")
        self._continuation = self._decoder.get("prefix", "##") if _mentions(self._decoder, "WordPiece") else None
        metadata = checkpoint.metadata
        # A model may have more embedding rows than tokens; the other rows have no text.
        known = max(self._library.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.vocab_size = max(known, rows or 0)
        settings = _part(metadata, "tokenizer_config")
        self.special_texts = _special_texts(settings)
        self.bos_id = self._id_of(self.special_texts.get("bos_token"))
        self.eos_id = self._id_of(self.special_texts.get("eos_token"))
        with library_errors.reading(path, "tokenizer", "fails on the text 'a'"):
            self._before, self._after = self._frame(settings)
            tokens: list[str] = self._library.encode("a", add_special_tokens=False).tokens
        self.adds_space_prefix = not self._byte_level and "".join(tokens).startswith(SPACE)
        self.add_bos = self.bos_id is not None and self.bos_id in self._before
        self.add_eos = self.eos_id is not None and self.eos_id in self._after
        self.eos_ids = self._ends(path, metadata)
        self.chat_templates = stored_templates(checkpoint)
        self.fill_in = fill_in_ids(self._library.token_to_id)

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._library.token_to_id(text)

    def _frame(self, settings: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """The ids before and after every text, with `add_bos_token` and `add_eos_token` applied."""
        bare = self._library.encode("a", add_special_tokens=False).ids
        framed = self._library.encode("a", add_special_tokens=True).ids
        place = next((at for at in range(len(framed)) if framed[at : at + len(bare)] == bare), 0)
        before, after = framed[:place], framed[place + len(bare) :]
        add_bos, add_eos = settings.get("add_bos_token"), settings.get("add_eos_token")
        if self.bos_id is not None and isinstance(add_bos, bool) and add_bos != (self.bos_id in before):
            before = [self.bos_id, *before] if add_bos else [index for index in before if index != self.bos_id]
        if self.eos_id is not None and isinstance(add_eos, bool) and add_eos != (self.eos_id in after):
            after = [*after, self.eos_id] if add_eos else [index for index in after if index != self.eos_id]
        return before, after

    def _ends(self, path: Path, metadata: Mapping[str, Any]) -> frozenset[int]:
        by_text = end_texts({self._added[index] for index in self.special_ids})
        ends = {index for index in self.special_ids if self._added[index] in by_text}
        if self.eos_id is not None:
            ends.add(self.eos_id)
        for file in ("generation_config", "config"):
            named = _part(metadata, file).get("eos_token_id")
            for index in named if isinstance(named, list) else [named]:
                if index is None:
                    continue
                if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                    raise CheckpointError(path.parent / f"{file}.json", "key 'eos_token_id'", f"{index!r} is not an id")
                ends.add(index)
        return frozenset(ends)

    def token_bytes(self, index: int) -> bytes:
        text = self.token_text(index)
        if index in self._added:
            return text.encode()
        if self._byte_level:
            return spelled_bytes(text)
        if self._continuation is not None:
            return (
                text.removeprefix(self._continuation) if text.startswith(self._continuation) else " " + text
            ).encode()
        if self._byte_fallback and text in BYTE_VALUES:
            return bytes((BYTE_VALUES[text],))
        return text.replace(SPACE, " ").encode()

    def token_text(self, index: int) -> str:
        text = self._library.id_to_token(self.check_id(index))
        return "" if text is None else text

    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        ids = self._encode_hidden(text, restore) if restore else self._plain(text, parse_special)
        return [*self._before, *ids, *self._after] if add_special else ids

    def _plain(self, text: str, parse_special: bool) -> list[int]:
        if self._grows:
            self._check_growth(text)
        return library_ids(self._library if parse_special else self._literal, text)

    @functools.cached_property
    def _literal(self) -> LibraryTokenizer:
        """The library's tokenizer with control tokens as text. The library keeps this setting in the tokenizer, and
        changing it would make other threads' short texts wait for a long one. The model is shared: a copy of a large
        one would take seconds, with the interpreter's lock held.
        """
        from tokenizers import Tokenizer as LibraryTokenizer

        literal = LibraryTokenizer(self._library.model)
        literal.normalizer, literal.pre_tokenizer = self._library.normalizer, self._library.pre_tokenizer
        added = self._library.get_added_tokens_decoder()
        literal.add_tokens([added[index] for index in sorted(added)])
        if {index: token.content for index, token in literal.get_added_tokens_decoder().items()} != self._added:
            literal = LibraryTokenizer.from_str(self._library.to_str())  # it numbered them in another order
        literal.encode_special_tokens = True
        return literal

    def _check_growth(self, text: str) -> None:
        """Refuse a text that normalisation makes far longer. The check normalises the text in parts."""
        limit, size = _USUAL_GROWTH * len(text.encode()) + _GROWTH_FLOOR, 0
        if (normalizer := self._library.normalizer) is None:
            return
        for start in range(0, len(text), _GROWTH_PART):
            with library_errors.encoding():
                size += len(normalizer.normalize_str(text[start : start + _GROWTH_PART]).encode())
            if size > limit:
                raise InvalidRequestError(f"normalisation makes the text more than {_USUAL_GROWTH} times as long")

    def _encode_hidden(self, text: str, restore: Mapping[int, str]) -> list[int]:
        """Cut at the control tokens that are parsed; the texts between may contain other control texts."""
        ids: list[int] = []
        for piece in SpecialTokenFinder({self._added[index]: index for index in self.special_ids}).split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._plain(piece.translate(restore), parse_special=False))
        return ids


def _read(path: Path, rows: int | None) -> tuple[LibraryTokenizer, float]:
    """Read and check the file of a model with so many ids; also returns the largest factor of normalisation.

    Raises CheckpointError where the file is not JSON of the known form, or exceeds a bound.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    data = read_bounded(path, _MAX_FILE_BYTES)
    try:
        growth = _Check(path, rows).growth(msgspec.json.decode(data, type=_File))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(path, "tokenizer", f"is malformed: {error}") from None
    with library_errors.reading(path, "tokenizer"):
        library = LibraryTokenizer.from_buffer(data)
        library.no_truncation()
        library.no_padding()
    return library, growth


def _rows(checkpoint: Checkpoint) -> int | None:
    """The number of the model's ids: the rows of its embedding, or else the configuration's `vocab_size`."""
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("embed_tokens.weight") and len(tensor.shape) == 2:
            return tensor.shape[0]
    config = _part(checkpoint.metadata, "config")
    stated = _part(config, "text_config").get("vocab_size", config.get("vocab_size"))
    return stated if type(stated) is int and 0 < stated <= MAX_VOCABULARY else None


def _part(metadata: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = metadata.get(name)
    return part if isinstance(part, Mapping) else {}


def _mentions(decoder: Any, kind: str) -> bool:
    return decoder.get("type") == kind or any(_mentions(part, kind) for part in decoder.get("decoders", ()))


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            texts[name] = value
    return texts


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
        if growth > _MAX_GROWTH:
            raise self.refuse("normalizer", f"makes up to {growth:.3g} bytes of one, above {_MAX_GROWTH:.0f}")
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
        if merges > (limit := 2 * _MAX_MERGES_PER_TOKEN * max(len(tokens), 256)):
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
        if size > _MAX_ADDED_BYTES:
            raise self.refuse("added_tokens", f"they have {size} bytes, above {_MAX_ADDED_BYTES}")
        return tokens

    def _ids(self, count: int, added: int, highest: int) -> None:
        known = self._rows if self._rows is not None else count + added
        if highest >= (limit := max(known, count) + _MAX_TOKENS_BEYOND_ROWS):
            raise self.refuse("added_tokens", f"token number {highest} is beyond the model's {known} rows")
        if self._rows is not None and count + added > 2 * limit:
            raise self.refuse("added_tokens", f"it has {count + added} tokens for the model's {known} rows")

    def _steps(self, key: str, raw: msgspec.Raw) -> list[Mapping[str, Any]]:
        text = bytes(raw)
        if len(text) > (_MAX_CHARSMAP_TEXT if b"precompiled_charsmap" in text else _MAX_STEPS_BYTES):
            raise self.refuse(key, f"has {len(text)} bytes")
        steps = [step for step in _objects(msgspec.json.decode(text)) if isinstance(step.get("type"), str)]
        if len(steps) > _MAX_STEPS:
            raise self.refuse(key, f"has {len(steps)} steps, above {_MAX_STEPS}")
        return steps

    def _step_growth(self, key: str, step: Mapping[str, Any]) -> float:
        pattern = step.get("pattern")
        texts = [text for text in pattern.values() if isinstance(text, str)] if isinstance(pattern, Mapping) else []
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > _MAX_PATTERN_BYTES:
            raise self.refuse(key, f"a pattern has {size} bytes, above {_MAX_PATTERN_BYTES}")
        if step["type"] == "Replace" and isinstance(content := step.get("content"), str):
            written = len(content.encode("utf-8", "surrogatepass"))
            # A regular expression may have an empty match before each byte.
            is_text = isinstance(pattern, Mapping) and bool(pattern.get("String"))
            return max(1.0, written / size) if is_text else 1.0 + written
        if step["type"] == "Prepend" and len(str(step.get("prepend"))) > _MAX_ADDITIONS:
            raise self.refuse(key, f"puts {len(str(step['prepend']))} characters before a text, above {_MAX_ADDITIONS}")
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
        if len(single) > _MAX_ADDITIONS or ids > _MAX_ADDITIONS:
            raise self.refuse("post_processor", f"adds more than {_MAX_ADDITIONS} tokens to a text")
        if len(texts) != 1 or not isinstance(texts[0], Mapping) or texts[0].get("id") != "A":
            raise self.refuse("post_processor", "does not hold the text once")


def _distinct_beginnings(texts: Iterable[bytes]) -> int:
    total, previous = 0, b""
    for text in sorted(texts):
        total += len(text) - sum(itertools.takewhile(bool, map(operator.eq, previous, text)))
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
