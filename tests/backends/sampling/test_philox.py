"""Philox4x32-10 against the published answers, and by way of a twin of any word size against numpy's Philox4x64-10."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.reference_sampler import philox

WORD = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox.philox4x32(counter, key) == expected


def philox_twin(counter: list[int], key: list[int], bits: int, multipliers: list[int], steps: list[int]) -> list[int]:
    """Ten rounds as the paper draws them: two multiplications whose high halves are mixed crosswise."""
    words, mask = list(counter), 2**bits - 1
    for turn in range(10):
        keys = [(key[i] + turn * steps[i]) & mask for i in range(2)]
        high0, low0 = divmod(multipliers[0] * words[0], 2**bits)
        high1, low1 = divmod(multipliers[1] * words[2], 2**bits)
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
    return words


@given(st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_twin_of_64_bits_is_numpys(values: list[int]) -> None:
    counter, key = values[:4], values[4:]
    multipliers = [0xD2E7470EE14C6C93, 0xCA5A826395121157]
    steps = [0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B]
    number = sum(word << (64 * i) for i, word in enumerate(counter))
    generator = np.random.Philox(counter=(number - 1) % 2**256, key=sum(word << (64 * i) for i, word in enumerate(key)))
    assert philox_twin(counter, key, 64, multipliers, steps) == [int(word) for word in generator.random_raw(4)]


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_equals_twin_of_32_bits(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    expected = philox_twin(list(counter), list(key), 32, [0xD2511F53, 0xCD9E8D57], [0x9E3779B9, 0xBB67AE85])
    assert list(philox.philox4x32(counter, key)) == expected


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 127), st.integers(0, 2**31), st.integers(0, 9))
def test_uniform_is_a_multiple_of_2_to_the_minus_24_below_1(seed: int, choice: int, position: int, draw: int) -> None:
    value = philox.uniform(seed, choice, position, draw)
    assert 0.0 <= value < 1.0
    assert (value * 2**24).is_integer()
    assert float(np.float32(value)) == value
    assert value == philox.uniform(seed % 2**64, choice, position, draw)


def test_uniform_takes_the_documented_words() -> None:
    seed = 0x0123456789ABCDEF
    for draw in range(8):
        words = philox.philox4x32((77, 3, draw // 4, 0), (0x89ABCDEF, 0x01234567))
        assert philox.uniform(seed, 3, 77, draw) == (words[draw % 4] // 256) / 2**24


def test_uniforms_are_uniform_and_differ_by_every_coordinate() -> None:
    values = np.array([philox.uniform(1, 0, position, 0) for position in range(20_000)])
    counts = np.bincount((values * 50).astype(int), minlength=50)
    assert ((counts - 400.0) ** 2 / 400.0).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        changed = np.array([philox.uniform(other[0], other[1], position, other[2]) for position in range(2_000)])
        assert abs(np.corrcoef(values[:2_000], changed)[0, 1]) < 0.07
