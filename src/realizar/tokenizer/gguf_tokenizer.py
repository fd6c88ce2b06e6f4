"""`GGUFTokenizer`: a tokenizer from the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import TokenizerError
from realizar.tokenizer.byte_alphabet import spelled_bytes
from realizar.tokenizer.pre_tokenizers import PreTokenizer, pre_tokenizer
from realizar.tokenizer.score_model import by_score
from realizar.tokenizer.special_tokens import SpecialTokenFinder, SpecialTokens, find_special_tokens
from realizar.tokenizer.templates.stored_templates import stored_templates
from realizar.tokenizer.tokenizer import Tokenizer
from realizar.tokenizer.tokenizers_models import BYTE_TOKENS, SPACE, Encode, byte_pair, unigram, word_pieces
from realizar.tokenizer.vocabulary import TokenType, Vocabulary, read_vocabulary


class GGUFTokenizer(Tokenizer):
    """The tokenizer of a GGUF file, built from its metadata alone.

    Raises:
        TokenizerError: the vocabulary is missing, or can't be reproduced exactly.
        CheckpointError: the vocabulary is malformed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        vocabulary = read_vocabulary(checkpoint)
        special = find_special_tokens(vocabulary)
        self._tokens, self._types = vocabulary.tokens, special.types
        self._kinds: list[int] = special.types.tolist()  # a list is faster to index than an array
        self._model = vocabulary.model
        cuts = vocabulary.merges or self._model in _MERGED
        self._pre = pre_tokenizer(vocabulary.pre, checkpoint.path) if cuts else None
        self._encode_piece = _build(vocabulary, special, self._pre)
        self._separator = special.ids.get("separator") if self._model == "bert" else None
        self._add_space = vocabulary.flags.get("add_space_prefix", self._model == "llama") and self._model == "llama"
        self._user_finder, self._all_finder = _finders(vocabulary, special)
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

    @property
    def adds_space_prefix(self) -> bool:
        return self._add_space

    def token_bytes(self, index: int) -> bytes:
        text = self._tokens[self.check_id(index)]
        kind = self._kinds[index]
        if kind == TokenType.BYTE and text in _BYTE_VALUES:
            return bytes((_BYTE_VALUES[text],))
        if kind not in (TokenType.NORMAL, TokenType.UNUSED):
            return text.encode()
        if self._pre is None or self._pre.escape_spaces:
            return text.replace(SPACE, " ").encode()
        return spelled_bytes(text) if self._pre.byte_level else text.encode()

    def token_text(self, index: int) -> str:
        return self._tokens[self.check_id(index)]

    def is_special(self, index: int) -> bool:
        return self._kinds[self.check_id(index)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def control_texts(self) -> frozenset[str]:
        control = np.flatnonzero(np.isin(self._types, (TokenType.CONTROL, TokenType.UNKNOWN)))
        return frozenset(self._tokens[index] for index in control.tolist())

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
                piece = (" " + piece if self._add_space and after_special else piece).replace(" ", SPACE)
            ids.extend(self._encode_piece(piece))
            after_special = False
        if add_special and self._separator is not None:
            ids.append(self._separator)
        elif add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids


_MERGED = ("gpt2", "gemma4", "whitespace")
_BYTE_VALUES = {token: value for value, token in enumerate(BYTE_TOKENS)}
_TEMPLATE_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "separator", "mask": "mask"}


def _build(vocabulary: Vocabulary, special: SpecialTokens, pre: PreTokenizer | None) -> Encode:
    if pre is not None:
        return byte_pair(vocabulary, pre)
    if vocabulary.model == "llama":
        return by_score(vocabulary, special)
    return unigram(vocabulary, special) if vocabulary.model == "t5" else word_pieces(vocabulary, special)


def _added(vocabulary: Vocabulary, pre: PreTokenizer | None) -> tuple[bool, bool]:
    """True for each of BOS and EOS that is added, by the file or by llama.cpp's default for the kind of model."""
    model = vocabulary.model
    if model == "bert":
        return True, False
    add_bos = vocabulary.flags.get("add_bos_token", model == "llama" or (pre is not None and pre.add_bos))
    add_eos = vocabulary.flags.get("add_eos_token", model == "t5")
    return add_bos or (pre is not None and pre.force_bos), add_eos


def _finders(vocabulary: Vocabulary, special: SpecialTokens) -> tuple[SpecialTokenFinder, SpecialTokenFinder]:
    """Two finders: for texts whose control tokens stay text, and for texts in which they are parsed."""
    tokens, types = vocabulary.tokens, special.types
    user = np.flatnonzero(types == TokenType.USER_DEFINED).tolist()
    control = np.flatnonzero(np.isin(types, (TokenType.CONTROL, TokenType.UNKNOWN))).tolist()
    strip_left: frozenset[int] = frozenset()
    strip_right: frozenset[int] = frozenset()
    name = vocabulary.name.lower()
    mask = "[MASK]" if "modern-bert" in name else "<mask>"
    if "modern-bert" in name or vocabulary.pre in _MASK_PRES or vocabulary.architecture in _MASK_ARCHITECTURES:
        strip_left = frozenset({vocabulary.ids[mask]} if mask in vocabulary.ids else ())
    elif "phi-3" in name or "phi3" in name:
        kept = {vocabulary.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        strip_right = frozenset({*user, *control, *_id_of(vocabulary, "</s>")} - kept)
    known = {tokens[index]: index for index in user}
    everything = {**known, **{tokens[index]: index for index in control}}
    return (
        SpecialTokenFinder(known, strip_left, strip_right),
        SpecialTokenFinder(everything, strip_left, strip_right),
    )


def _id_of(vocabulary: Vocabulary, text: str) -> set[int]:
    return {vocabulary.ids[text]} if text in vocabulary.ids else set()


_MASK_PRES = ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert")
_MASK_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3")
