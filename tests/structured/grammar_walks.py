"""Random walks through grammars: a small vocabulary, and what a model without taste would write with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.structured.grammar import Grammar, GrammarFactory, GrammarMatcher
from realizar.structured.grammar_tokens import GrammarTokens

END, CONTROL = 0, 1
_TEXTS = (
    '{"', '":', '": "', '",', '","', '", "', '"}', '"]', '}}', '},', '],', '[{', ': ', ', ', '\n', '\n  ', '  ', ' {',
    ' [', '"\n', 'true', 'false', 'null', 'tr', 'ue', 'nu', 'll', '12', '-1', '0.', '.5', 'e+', 'E-', '10', '00', '99',
    'name', 'value', 'the', ' the', 'ab', 'abc', 'bc', 'foo', 'ba', 'ar', 'item', 'key', '\\"', '\\n', '\\u00', 'é',
    'ü', '日', '本', '😀', '-01', '20', 'T1', ':3', 'Z', '@', '.com', 'www', '://', 'http', '2024-', '-12-', 'cafe',
)  # fmt: skip
TEXTS = tuple(text.encode() for text in _TEXTS)
# Single bytes, the pieces, halves of characters, and two control tokens whose names look like text.
TOKENS: tuple[bytes, ...] = (
    b"</s>",
    b'"',
    *(bytes((byte,)) for byte in range(256)),
    *TEXTS,
    b"\xe6\x97",
    b"\xa5\xe6",
    b"\x9f\x98\x80",
)
_CLOSING = (b"}", b"]", b'"')
BUDGET = 60


def small_factory(vocab_size: int | None = None) -> GrammarFactory:
    size = len(TOKENS) + 7 if vocab_size is None else vocab_size
    return GrammarFactory(GrammarTokens(TOKENS, (CONTROL,), (END,), size))


def allowed_ids(mask: NDArray[np.uint32]) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def masks_of(factory: GrammarFactory, rows: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[NDArray[np.uint32]]:
    """The allowed ids of rows and of their drafts: uint32 [drafts + 1, words] for each row."""
    found = [np.empty((len(drafts) + 1, factory.num_words), np.uint32) for _, drafts in rows]
    for (row, drafts), out in zip(rows, found, strict=True):
        factory.fill(row, drafts, out)
    return found


def next_ids(factory: GrammarFactory, matcher: GrammarMatcher) -> list[int]:
    """Ids that may come next."""
    (mask,) = masks_of(factory, [(matcher, ())])
    assert mask.shape == (1, factory.num_words)
    return [int(index) for index in allowed_ids(mask[0])]


def walk(
    factory: GrammarFactory, grammar: Grammar, rng: np.random.Generator, tokens: Sequence[bytes] = TOKENS
) -> tuple[list[int], bytes]:
    """Random allowed ids up to the end, and their text; after a while such as close what is open."""
    matcher = grammar.start()
    ids: list[int] = []
    while not matcher.ended:
        allowed = next_ids(factory, matcher)
        assert matcher.error is None, matcher.error
        assert len(ids) < 5000, b"".join(tokens[index] for index in ids)
        if len(ids) < BUDGET or rng.random() < 0.2:
            chosen = int(rng.choice(allowed))
        else:
            ranks = [_haste(index, tokens[index]) for index in allowed]
            chosen = int(rng.choice([index for index, rank in zip(allowed, ranks, strict=True) if rank == min(ranks)]))
        matcher.advance([chosen])
        ids.append(chosen)
    return ids, b"".join(tokens[index] for index in ids[:-1])


def walk_beside(
    factory: GrammarFactory, rows: tuple[GrammarMatcher, GrammarMatcher], rng: np.random.Generator, most: int
) -> list[int]:
    """Random ids that two matchers of one language take in, `most` or up to the end, with equal masks; how many ids
    each mask allows.
    """
    counts: list[int] = []
    while not rows[0].ended and len(counts) < most:
        (mask,), (expected,) = (masks_of(factory, [(row, ())])[0] for row in rows)
        assert np.array_equal(mask, expected)
        allowed = allowed_ids(mask)
        counts.append(len(allowed))
        chosen = int(rng.choice(allowed))
        for row in rows:
            row.advance([chosen])
    return counts


def _haste(index: int, token: bytes) -> tuple[int, int]:
    """The end first, then what closes, then short tokens; separators last."""
    if index == END:
        return 0, 0
    if token in _CLOSING:
        return 1, 0
    return (2 if token in b",:" else 3 if token[:1] not in b" \n\t\\" else 4), len(token)
