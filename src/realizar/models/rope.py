"""Rotary frequencies: plain and with linear, llama-3, YaRN and longrope scaling. numpy only.

All values are computed in float32, in the order of operations of Hugging Face's transformers
(`modeling_rope_utils.py`), with which the models were trained and published.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float32]


def plain_frequencies(base: float, size: int) -> Frequencies:
    """float32 [size / 2]: `base ** (-2 i / size)` radians per position."""
    return np.float32(1) / _powers(base, size)


def proportional_frequencies(base: float, size: int, share: float, factor: float) -> Frequencies:
    """The first `share` of plain frequencies divided by `factor`, zeros for the others, which do not rotate."""
    frequencies = linear_frequencies(base, size, factor)
    frequencies[int(share * size // 2) :] = 0
    return frequencies


def linear_frequencies(base: float, size: int, factor: float) -> Frequencies:
    """Positions divided by `factor`."""
    return plain_frequencies(base, size) / np.float32(factor)


def llama3_frequencies(
    base: float, size: int, factor: float, low_factor: float, high_factor: float, original_context: float
) -> Frequencies:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between blended."""
    frequencies = plain_frequencies(base, size)
    wavelengths = np.float32(2 * math.pi) / frequencies
    is_long = wavelengths > np.float32(original_context / low_factor)
    is_short = wavelengths < np.float32(original_context / high_factor)
    scaled = np.where(is_long, frequencies / np.float32(factor), frequencies)
    smooth = np.float32(original_context) / wavelengths - np.float32(low_factor)
    smooth = smooth / np.float32(high_factor - low_factor)
    blended = (np.float32(1) - smooth) * scaled / np.float32(factor) + smooth * scaled
    return np.where(is_long | is_short, scaled, blended)


def yarn_frequencies(
    base: float, size: int, factor: float, original_context: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Frequencies:
    """YaRN (https://arxiv.org/abs/2309.00071): fast dimensions keep their frequency, slow ones are divided by `factor`.

    Args:
        beta_fast, beta_slow: rotations within the original context at which the ramp ends and begins.
        truncate: the ramp's ends are rounded outwards to whole dimensions.
    """

    def dimension(rotations: float) -> float:
        return size * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _powers(base, size)
    divided = np.float32(1) / (np.float32(factor) * powers)
    frequencies: Frequencies = divided * (np.float32(1) - keep) + np.float32(1) / powers * keep
    return frequencies


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosine and sine: `0.1 scale ln(factor) + 1`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def divided_frequencies(base: float, size: int, divisors: NDArray[np.float32], factor: float = 1.0) -> Frequencies:
    """Each frequency divided by its own divisor, [size / 2], and by `factor`: longrope, and `rope_freqs` of GGUF files.

    Products beyond float32 are infinite: such a dimension does not rotate.
    """
    with np.errstate(over="ignore"):
        divided = divisors.astype(np.float32) * np.float32(factor) * _powers(base, size)
    return np.float32(1) / divided


def longrope_magnitude(factor: float, original_context: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def _powers(base: float, size: int) -> Frequencies:
    """`base ** (2 i / size)`; the exponent rounded to float32, the power correctly rounded (torch's nearly is)."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
