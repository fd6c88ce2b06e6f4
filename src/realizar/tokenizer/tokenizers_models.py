"""Encodings of text to token ids by a GGUF vocabulary, with the tokenizers library.

The text contains no special tokens, which are cut out earlier. The library is imported when a tokenizer is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from realizar.errors import TokenizerError
from realizar.tokenizer import library_errors
from realizar.tokenizer.pre_tokenizers import PreTokenizer
from realizar.tokenizer.special_tokens import SpecialTokens
from realizar.tokenizer.vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

Encode = Callable[[str], list[int]]

SPACE = "▁"  # U+2581, SentencePiece's space
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
BYTE_VALUES = {token: value for value, token in enumerate(BYTE_TOKENS)}
# BERT's own limit; a longer word is unknown. The library's search takes quadratic time in it.
_LONGEST_WORD = 100
_LONG_TEXT = 4096


def byte_pair(vocabulary: Vocabulary, pre: PreTokenizer) -> Encode:
    """Make a byte-pair encoding from the file's merges."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    with library_errors.reading(vocabulary.path, "key 'tokenizer.ggml.merges'", "names no token"):
        model = models.BPE(
            vocab=dict(vocabulary.ids),
            merges=vocabulary.merges,
            byte_fallback=not pre.byte_level,
            ignore_merges=pre.ignore_merges,
        )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    encode: Encode = partial(library_ids, tokenizer)
    if vocabulary.model == "whitespace":
        return _whitespace_words(encode, lowercase=vocabulary.flags.get("normalizer.lowercase", False))
    if pre.prefix_words:
        encode = _prefixed_lines(encode)
    if pre.whole_newlines:
        encode = _whole_newlines(encode, vocabulary.ids)
    if pre.escape_spaces:
        escaped = encode
        return lambda text: escaped(text.replace(" ", SPACE))
    return encode


def unigram(vocabulary: Vocabulary, special: SpecialTokens) -> Encode:
    """Make SentencePiece's unigram encoding, with its compiled normalisation and its treatment of spaces."""
    from tokenizers import Tokenizer, models, normalizers

    unknown = special.ids.get("unknown")
    if unknown is None:
        raise TokenizerError(f"{vocabulary.path}: a unigram vocabulary needs an unknown token")
    pieces: list[tuple[str, float]] = []
    kinds = special.types.tolist()
    for index, (token, score) in enumerate(zip(vocabulary.tokens, vocabulary.scores.tolist(), strict=True)):
        if kinds[index] == TokenType.USER_DEFINED:
            pieces.append((token, 0.0))
        elif kinds[index] in (TokenType.NORMAL, TokenType.UNUSED):
            pieces.append((token, score))
        else:
            pieces.append((f"\0{index}", 0.0))  # never spelled by text: normalisation drops \0
    with library_errors.reading(vocabulary.path, "key 'tokenizer.ggml.tokens'"):
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    normalizer = None
    if vocabulary.charsmap:
        with library_errors.reading(vocabulary.path, "key 'tokenizer.ggml.precompiled_charsmap'"):
            normalizer = normalizers.Precompiled(vocabulary.charsmap)
    prefix = vocabulary.flags.get("add_space_prefix", False)
    merge_spaces = vocabulary.flags.get("remove_extra_whitespaces", False)
    encode_piece = partial(library_ids, tokenizer)

    def encode(text: str) -> list[int]:
        text = text.replace("\0", "")
        if normalizer is not None:
            with library_errors.encoding():
                text = normalizer.normalize_str(text)
        if merge_spaces:
            text = "".join(SPACE + word for word in text.split(" ") if word)
        elif prefix and text.strip(" "):
            spaces = len(text) - len(text.lstrip(" "))
            text = text[:spaces] + " " + text[spaces:]
        return encode_piece(text.replace(" ", SPACE)) if text else []

    return encode


def word_pieces(vocabulary: Vocabulary, special: SpecialTokens) -> Encode:
    """Make BERT's longest-match encoding. GGUF marks the start of a word (U+2581) and not its continuation (`##`)."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    unknown = special.ids.get("unknown")
    if unknown is None:
        raise TokenizerError(f"{vocabulary.path}: a WordPiece vocabulary needs an unknown token")
    lowercase = vocabulary.flags.get("normalizer.lowercase", True)
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab=dict(vocabulary.ids),
            unk_token=vocabulary.tokens[unknown],
            continuing_subword_prefix="",
            max_input_chars_per_word=_LONGEST_WORD + 1,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=vocabulary.flags.get("normalizer.strip_accents", lowercase),
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=False),
        ]
    )
    return partial(library_ids, tokenizer)


def library_ids(tokenizer: LibraryTokenizer, text: str) -> list[int]:
    """Token ids of a text from the library, without its special tokens.

    During a long text other threads can run, because a batch releases the interpreter's lock; a single text would hold
    it for a second per megabyte. Raises InvalidRequestError where the library fails on this text.
    """
    with library_errors.encoding():
        if len(text) < _LONG_TEXT:
            found = tokenizer.encode(text, add_special_tokens=False)
        else:
            found = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
    ids: list[int] = found.ids
    return ids


def _whole_newlines(encode: Encode, ids: Mapping[str, int]) -> Encode:
    def split(text: str) -> list[int]:
        if "\n" not in text:
            return encode(text)
        found: list[int] = []
        for piece in re.split("(\n+)", text):
            if piece.startswith("\n") and piece in ids:
                found.append(ids[piece])
            elif piece:
                found.extend(encode(piece))
        return found

    return split


def _prefixed_lines(encode: Encode) -> Encode:
    start = re.compile(rf"^(?=[^\n{SPACE}])", re.MULTILINE)
    return lambda text: encode(start.sub(SPACE, text))


def _whitespace_words(encode: Encode, *, lowercase: bool) -> Encode:
    return lambda text: [index for word in (text.lower() if lowercase else text).split() for index in encode(word)]
