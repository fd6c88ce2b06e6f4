"""`GGUFTokenizer`: a tokenizer from the vocabulary of a GGUF file."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import TokenizerError
from realizar.tokenizer.byte_alphabet import spelled_bytes
from realizar.tokenizer.pre_tokenizers import PreTokenizer, pre_tokenizer
from realizar.tokenizer.special_tokens import SpecialTokenFinder, SpecialTokens, find_special_tokens
from realizar.tokenizer.templates.stored_templates import stored_templates
from realizar.tokenizer.tokenizer import Tokenizer
from realizar.tokenizer.tokenizers_models import (
    BYTE_TOKENS,
    BYTE_VALUES,
    SPACE,
    Encode,
    byte_pair,
    unigram,
    word_pieces,
)
from realizar.tokenizer.vocabulary import MERGED_MODELS, TokenType, Vocabulary, read_vocabulary


class GGUFTokenizer(Tokenizer):
    """The tokenizer of a GGUF file, built from its metadata alone.

    Raises:
        TokenizerError: the vocabulary is missing, or can't be reproduced exactly.
        CheckpointError: the vocabulary is malformed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        vocabulary = read_vocabulary(checkpoint)
        special = find_special_tokens(vocabulary)
        self._tokens = vocabulary.tokens
        self._kinds: list[int] = special.types.tolist()  # a list is faster to index than an array
        self._model = vocabulary.model
        is_merged = self._model in MERGED_MODELS
        self._pre = pre_tokenizer(vocabulary.pre, checkpoint.path) if is_merged else None
        self._encode_piece = _build(vocabulary, special, self._pre)
        self._separator = special.ids.get("separator") if self._model == "bert" else None
        self.adds_space_prefix = self._model == "llama" and vocabulary.flags.get("add_space_prefix", True)
        control = np.flatnonzero(np.isin(special.types, (TokenType.CONTROL, TokenType.UNKNOWN))).tolist()
        self.special_ids = frozenset(control)
        self._user_finder, self._all_finder = _finders(vocabulary, special, control)
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id, self.eos_id = special.ids.get("bos"), special.ids.get("eos")
        self.eos_ids = special.end_of_generation
        self.add_bos, self.add_eos = _added(vocabulary, self._pre)
        if self.bos_id is None and not vocabulary.flags.get("add_bos_token"):
            self.add_bos = False  # only the kind of model asks for a BOS, and the file has none
        if self.add_bos and self.bos_id is None:
            raise TokenizerError(f"{checkpoint.path}: the file asks for a BOS token and names none")
        if self.add_eos and self.eos_id is None:
            raise TokenizerError(f"{checkpoint.path}: the file asks for an EOS token and names none")
        self.chat_templates = stored_templates(checkpoint)
        self.fill_in = special.fill_in
        self.special_texts = {
            f"{name}_token": vocabulary.tokens[special.ids[role]]
            for name, role in _TEMPLATE_NAMES.items()
            if role in special.ids
        }

    def token_bytes(self, index: int) -> bytes:
        text = self._tokens[self.check_id(index)]
        kind = self._kinds[index]
        if kind == TokenType.BYTE and text in BYTE_VALUES:
            return bytes((BYTE_VALUES[text],))
        if kind not in (TokenType.NORMAL, TokenType.UNUSED):
            return text.encode()
        if self._pre is None or self._pre.escape_spaces:
            return text.replace(SPACE, " ").encode()
        return spelled_bytes(text) if self._pre.byte_level else text.encode()

    def token_text(self, index: int) -> str:
        return self._tokens[self.check_id(index)]

    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        finder = self._all_finder if parse_special else self._user_finder
        after_special = True
        for piece in finder.split(text):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
                continue
            if restore:
                piece = piece.translate(restore)
            if self._model == "llama":
                piece = (" " + piece if self.adds_space_prefix and after_special else piece).replace(" ", SPACE)
            ids.extend(self._encode_piece(piece))
            after_special = False
        if add_special and self._separator is not None:
            ids.append(self._separator)
        elif add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids


_TEMPLATE_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "separator", "mask": "mask"}


def _build(vocabulary: Vocabulary, special: SpecialTokens, pre: PreTokenizer | None) -> Encode:
    if pre is not None:
        return byte_pair(vocabulary, pre)
    if vocabulary.model == "llama":
        return _by_score(vocabulary, special)
    return unigram(vocabulary, special) if vocabulary.model == "t5" else word_pieces(vocabulary, special)


def _added(vocabulary: Vocabulary, pre: PreTokenizer | None) -> tuple[bool, bool]:
    """True for each of BOS and EOS that is added, by the file or by llama.cpp's default for the kind of model."""
    model = vocabulary.model
    if model == "bert":
        return True, False
    add_bos = vocabulary.flags.get("add_bos_token", model == "llama" or (pre is not None and pre.add_bos))
    add_eos = vocabulary.flags.get("add_eos_token", model == "t5")
    return add_bos or (pre is not None and pre.force_bos), add_eos


def _finders(
    vocabulary: Vocabulary, special: SpecialTokens, control: Sequence[int]
) -> tuple[SpecialTokenFinder, SpecialTokenFinder]:
    """Two finders: for texts whose control tokens stay text, and for texts in which they are parsed."""
    tokens = vocabulary.tokens
    user = np.flatnonzero(special.types == TokenType.USER_DEFINED).tolist()
    strip_left: frozenset[int] = frozenset()
    strip_right: frozenset[int] = frozenset()
    name = vocabulary.name.lower()
    mask = "[MASK]" if "modern-bert" in name else "<mask>"
    if "modern-bert" in name or vocabulary.pre in _MASK_PRES or vocabulary.architecture in _MASK_ARCHITECTURES:
        strip_left = _ids_of(vocabulary, mask)
    elif "phi-3" in name or "phi3" in name:
        kept = _ids_of(vocabulary, "<unk>", "<s>", "<|endoftext|>")
        strip_right = frozenset({*user, *control, *_ids_of(vocabulary, "</s>")} - kept)
    known = {tokens[index]: index for index in user}
    everything = {**known, **{tokens[index]: index for index in control}}
    return (
        SpecialTokenFinder(known, strip_left, strip_right),
        SpecialTokenFinder(everything, strip_left, strip_right),
    )


def _ids_of(vocabulary: Vocabulary, *texts: str) -> frozenset[int]:
    return frozenset(vocabulary.ids[text] for text in texts if text in vocabulary.ids)


_MASK_PRES = ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert")
_MASK_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3")


# Encoding of text to token ids by SentencePiece's byte-pair vocabularies with scores (`llama`).
#
# SentencePiece merges, again and again, the neighbours whose joint token has the highest score, the leftmost of
# equals. A merge makes a token, so it never joins two characters that no token has side by side. A text is cut there,
# into pieces of a word or less, which are merged by themselves and remembered. A vocabulary of a quarter of a million
# tokens is ready in a tenth of a second; the tokenizers library takes a second or more to build it, and holds the
# interpreter's lock.

_KEPT_PIECES = 1 << 15
_LONGEST_KEPT = 64
_TABLE_BITS = 22
_BASE = np.uint64(0x9E3779B97F4A7C15)
_CODE_BITS = np.uint64(21)


def _by_score(vocabulary: Vocabulary, special: SpecialTokens) -> Encode:
    """Make SentencePiece's encoding, of spaces as U+2581; TokenizerError where characters can't be expressed."""
    # The texts of user-defined tokens are cut out earlier, except spaces, which are escaped afterwards.
    mergeable = np.isin(special.types, (TokenType.NORMAL, TokenType.UNUSED))
    for index in np.flatnonzero(special.types == TokenType.USER_DEFINED).tolist():
        mergeable[index] = SPACE in vocabulary.tokens[index]
    ids, unknown = vocabulary.ids, special.ids.get("unknown")
    has_bytes = all(token in ids for token in BYTE_TOKENS)
    if not has_bytes and unknown is None:
        raise TokenizerError(f"{vocabulary.path}: the vocabulary has neither all bytes nor an unknown token")
    places = np.flatnonzero(mergeable)
    costs = dict(
        zip(map(vocabulary.tokens.__getitem__, places.tolist()), (-vocabulary.scores[places]).tolist(), strict=True)
    )
    neighbours = _Neighbours(list(costs))

    def merged(piece: str) -> list[int]:
        found: list[int] = []
        for token in merge_by_score(piece, costs):
            index = ids.get(token)
            found.extend(_spelled(token, ids, unknown) if index is None else (index,))
        return found

    kept = functools.lru_cache(maxsize=_KEPT_PIECES)(merged)

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for piece in neighbours.cut(text):
            found.extend(kept(piece) if len(piece) <= _LONGEST_KEPT else merged(piece))
        return found if has_bytes else _fused(found, unknown)

    return encode


def merge_by_score(text: str, costs: Mapping[str, float]) -> list[str]:
    """The pieces of `text`, merged by cost, the negated score of a token: tokens, or characters that are none."""
    pieces = list(text)
    following = list(range(1, len(pieces) + 1))
    preceding = list(range(-1, len(pieces) - 1))
    queue: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right < len(pieces):
            cost = costs.get(pieces[left] + pieces[right])
            if cost is not None:
                heapq.heappush(queue, (cost, left, right, len(pieces[left]) + len(pieces[right])))

    for left in range(len(pieces) - 1):
        consider(left, left + 1)
    while queue:
        _, left, right, size = heapq.heappop(queue)
        if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != size:
            continue  # one of the two has been merged since
        pieces[left] += pieces[right]
        pieces[right] = ""
        following[left] = following[right]
        if following[left] < len(pieces):
            preceding[following[left]] = left
        consider(preceding[left], left)
        consider(left, following[left])
    return [piece for piece in pieces if piece]


class _Neighbours:
    """Knows which characters stand side by side in a token, by a table of hashes.

    Pairs that share a hash with one of these count as such too, which leaves a text in larger pieces, and as right.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
        hashes = _pair_hashes("".join(tokens))
        within = np.ones(len(hashes), np.bool_)
        within[ends[:-1] - 1] = False  # the last character of a token, and the first of the next one
        self._known = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._known[hashes[within]] = True

    def cut(self, text: str) -> Iterator[str]:
        """The text in order, cut where no merge can join."""
        start = 0
        for end in (np.flatnonzero(~self._known[_pair_hashes(text)]) + 1).tolist():
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]


def _pair_hashes(text: str) -> NDArray[np.uint64]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    pairs = (codes[:-1] << _CODE_BITS) | codes[1:]
    hashes: NDArray[np.uint64] = (pairs * _BASE) >> np.uint64(64 - _TABLE_BITS)
    return hashes


def _spelled(character: str, ids: Mapping[str, int], unknown: int | None) -> list[int]:
    """A character outside the vocabulary as its bytes, or as the unknown token where one of them is missing."""
    found = [ids.get(BYTE_TOKENS[byte], unknown) for byte in character.encode()]
    known = [index for index in found if index is not None]
    return [unknown] if unknown is not None and unknown in known else known


def _fused(found: list[int], unknown: int | None) -> list[int]:
    return [index for place, index in enumerate(found) if index != unknown or not place or found[place - 1] != unknown]
