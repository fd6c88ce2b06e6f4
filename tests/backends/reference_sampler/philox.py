"""Philox in plain Python, of which backends have kernels of their own.

A uniform is a pure function of (seed, index of the choice, position, number of the draw there), so a request's draws
do not depend on what else runs, on batching, or on preemption. Philox4x32-10 is from Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (SC'11).

Key: the seed modulo 2^64, low word first. Counter words: position, choice, draw // 4, 0. Draw d takes word d % 4 of the
block, so one block gives a position's first four draws.
"""

from __future__ import annotations

Words = tuple[int, int, int, int]

DRAW_TOKEN = 0  # number of the draw that picks the token
DRAW_XTC = 1  # number of the draw that decides whether XTC acts

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words of a 128-bit counter and a 64-bit key, both as 32-bit words, lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        wide0 = _MULTIPLIERS[0] * c0
        wide1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (wide1 >> 32) ^ c1 ^ k0, wide1 & _WORD, (wide0 >> 32) ^ c3 ^ k1, wide0 & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, draw: int) -> float:
    """A number in [0, 1) with 24 bits, k / 2^24, hence exact in float32 and in float64.

    `position` is the index in the sequence of the token being sampled, `draw` the number of the draw at that position.
    """
    counter = (position & _WORD, choice & _WORD, draw >> 2, 0)
    words = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return (words[draw & 3] >> 8) * 2.0**-24
