"""QK norm, rotary embedding and the KV cache's element types against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.cpu.kernels.kernel_calls import call
from backends.cpu.kernels.kv_blocks import KVBlocks, layout_of
from realizar.backends.cpu.kernels.normalize import LAYER_NORM, RMS_NORM
from realizar.backends.cpu.kernels.rotate import ROTATE, make_rotate
from realizar.backends.cpu.kv.layout import KV_DTYPES, KVLayout
from realizar.quantization.microscaling import e4m3
from reference_model import nearest_e4m3

EPS = 1e-6
TOKENS, HEADS, KV_HEADS, BLOCKS = 7, 6, 3, 4
ROUNDING = {"f32": 2.0**-22, "f16": 2.0**-11, "bf16": 2.0**-8}  # relative; bf16 rounds half of 2**-8, after 1e-6


def expected_heads(
    x: np.ndarray, angles: np.ndarray, interleaved: bool, norm: tuple[np.ndarray, np.ndarray | None, int] | None
) -> np.ndarray:
    y = x.astype(np.float64)
    if norm is not None:
        weight, bias, kind = norm
        y = y - y.mean(-1, keepdims=True) if kind == LAYER_NORM else y
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * weight + (0 if bias is None else bias)
    half = angles.shape[1]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def run(
    dtype: str, size: int, rotary: int, interleaved: bool, norm_kind: int | None, second: bool = False,
    grows: bool = False, value_norm: bool = False,
) -> None:  # fmt: skip
    rng = np.random.default_rng(size + rotary)
    query = rng.standard_normal((TOKENS, HEADS * size)).astype(np.float32)
    key, first, rest = (rng.standard_normal((TOKENS, KV_HEADS * size)).astype(np.float32) for _ in range(3))
    value = np.concatenate([first, rest], axis=1)
    angles = rng.uniform(-np.pi, np.pi, (TOKENS, rotary // 2))
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    weights = 1 + 0.3 * rng.standard_normal((2, size)).astype(np.float32)
    biases = rng.standard_normal((2, size)).astype(np.float32) if norm_kind == LAYER_NORM else None
    layout = layout_of(KV_HEADS, size, dtype)
    blocks = KVBlocks(layout, BLOCKS)
    untouched = blocks.memory.copy()
    slots = rng.permutation(BLOCKS * 32)[:TOKENS].astype(np.int32)
    norms: list[Any] = [None, None]
    if norm_kind is not None:
        norms = [(weights[i], None if biases is None else biases[i], norm_kind) for i in range(2)]
    expected_query = expected_heads(query.reshape(TOKENS, HEADS, size), angles, interleaved, norms[0])
    growth = rng.uniform(1, 2, TOKENS).astype(np.float32)
    if grows:
        expected_query *= growth[:, None, None]
    expected_key = expected_heads(key.reshape(TOKENS, KV_HEADS, size), angles, interleaved, norms[1])
    expected_value = (first.astype(np.float64) + (rest if second else 0)).reshape(TOKENS, KV_HEADS, size)
    if value_norm:
        expected_value /= np.sqrt((expected_value**2).mean(-1, keepdims=True) + EPS)
    call(
        make_rotate(KV_DTYPES.index(dtype)).address, ROTATE, 3, step=np.array([TOKENS], np.int64), query=query,
        query_stride=query.strides[0], key=key, key_stride=key.strides[0], value=value, value_stride=value.strides[0],
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=size, cosine=cosine, sine=sine, rotary=rotary,
        interleaved=int(interleaved), query_norm=weights[0] if norm_kind is not None else 0,
        key_norm=weights[1] if norm_kind is not None else 0, norm_kind=norm_kind or 0, eps=EPS,
        query_norm_bias=0 if biases is None else biases[0], key_norm_bias=0 if biases is None else biases[1],
        slots=slots, cache=blocks.memory, **layout.fields(),
        second_value=first.shape[1] * 4 if second else 0, query_scales=growth if grows else 0,
        value_eps=EPS if value_norm else 0.0,
    )  # fmt: skip
    np.testing.assert_allclose(query.reshape(expected_query.shape), expected_query, atol=2e-6, rtol=2e-6)
    for token, slot in enumerate(slots):
        for stored, expected in zip(blocks.read(int(slot)), (expected_key[token], expected_value[token]), strict=True):
            if dtype == "int8":
                tolerance = np.abs(expected).max() / 127 * 0.51
            elif dtype == "fp8":
                tolerance = 2.0**-4 * np.abs(expected) + 2.0**-10 * max(layout.scales) + 2e-6
            else:
                tolerance = ROUNDING[dtype] * np.abs(expected) + 2e-6
            assert np.all(np.abs(stored - expected) <= tolerance)
    clean = KVBlocks(layout, BLOCKS)
    clean.memory[:] = blocks.memory
    for slot in slots:  # put poison back where a token was written: nothing else may have changed
        for head in range(KV_HEADS):
            keys, values, key_scales, value_scales = clean.parts(slot // 32, head)
            keys[:size, slot % 32].view(np.uint8 if dtype == "int8" else f"u{keys.itemsize}")[...] = (
                1 << 8 * keys.itemsize
            ) - 1
            values[slot % 32, :size].view(f"u{values.itemsize}")[...] = (1 << 8 * values.itemsize) - 1
            if dtype == "int8":
                key_scales.view(np.uint32)[:, slot % 32] = value_scales.view(np.uint32)[slot % 32] = 0xFFFFFFFF
    np.testing.assert_array_equal(clean.memory, untouched)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("size", [64, 80, 24])
def test_element_types_and_head_sizes(size: int, dtype: str) -> None:
    run(dtype, size, size, interleaved=False, norm_kind=None)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [0, 16, 48, 96])
def test_partial_rotary_and_pairings(rotary: int, interleaved: bool) -> None:
    run("f16", 96, rotary, interleaved, norm_kind=None)


@pytest.mark.parametrize("norm_kind", [RMS_NORM, LAYER_NORM])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_norm_of_queries_and_keys(dtype: str, norm_kind: int) -> None:
    run(dtype, 128, 128, interleaved=False, norm_kind=norm_kind)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_values_of_two_terms(dtype: str) -> None:
    run(dtype, 80, 32, interleaved=True, norm_kind=None, second=True)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_queries_that_grow_and_norms_of_values(dtype: str) -> None:
    run(dtype, 80, 32, interleaved=False, norm_kind=RMS_NORM, second=True, grows=True, value_norm=True)


def test_bytes_of_e4m3() -> None:
    """Each number, those between two of them and near that, those beyond the largest, and none, of both signs."""
    numbers = e4m3()[:127].astype(np.float64)
    between = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(between, np.float32(to)) for to in (0, np.inf)]
    beyond = np.array([449, 464, 480, 1e9, np.inf, np.nan], np.float32)
    values = np.concatenate([numbers.astype(np.float32), between, *near, beyond])
    values = np.resize(np.concatenate([values, -values]), (32, 64))
    scaled = values * np.float32(2)  # by powers of two, which round nothing
    layout = KVLayout(1, 64, 32, "fp8", (2.0, 0.5))
    blocks, key, value = KVBlocks(layout, 1), scaled.copy(), (values / 2).astype(np.float32)
    unused = dict.fromkeys((
        "query", "query_stride", "num_heads", "query_norm", "query_norm_bias", "key_norm", "key_norm_bias",
        "norm_kind", "cosine", "sine", "rotary", "interleaved", "query_scales", "second_value",
    ), 0)  # fmt: skip
    call(
        make_rotate(KV_DTYPES.index("fp8")).address, ROTATE, 2, step=np.array([32], np.int64), key=key, value=value,
        key_stride=256, value_stride=256, num_kv_heads=1, head_size=64, eps=0.0, value_eps=0.0,
        slots=np.arange(32, dtype=np.int32), cache=blocks.memory, **layout.fields(), **unused,
    )  # fmt: skip
    keys, stored, _, _ = blocks.parts(0, 0)
    np.testing.assert_array_equal(keys.T, nearest_e4m3(values))
    np.testing.assert_array_equal(stored, nearest_e4m3(values))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_is_no_number_stays_so(dtype: str) -> None:
    """Of int8 with all that share its scale."""
    layout = layout_of(1, 64, dtype)
    blocks, key = KVBlocks(layout, 1), np.ones((1, 64), np.float32)
    value = np.full((1, 64), 2, np.float32)
    key[0, 40] = value[0, 3] = np.nan
    unused = dict.fromkeys((
        "query", "query_stride", "num_heads", "query_norm", "query_norm_bias", "key_norm", "key_norm_bias",
        "norm_kind", "cosine", "sine", "rotary", "interleaved", "query_scales", "second_value",
    ), 0)  # fmt: skip
    call(
        make_rotate(KV_DTYPES.index(dtype)).address, ROTATE, 1, step=np.array([1], np.int64), key=key, value=value,
        key_stride=256, value_stride=256, num_kv_heads=1, head_size=64, eps=0.0, value_eps=0.0,
        slots=np.array([3], np.int32), cache=blocks.memory, **layout.fields(), **unused,
    )  # fmt: skip
    for stored, first, end in zip(blocks.read(3), (32, 0), (64, 32), strict=True):
        lost = np.isnan(stored[0])
        assert lost[40 if first else 3]
        assert lost.sum() == (32 if dtype == "int8" else 1)
        assert lost[first:end].sum() == lost.sum()


def test_queries_alone() -> None:
    """Without KV heads: the cache is that of another layer."""
    query = np.random.default_rng(2).standard_normal((TOKENS, HEADS * 32)).astype(np.float32)
    angles = np.random.default_rng(3).uniform(-np.pi, np.pi, (TOKENS, 16))
    expected = expected_heads(query.reshape(TOKENS, HEADS, 32), angles, False, None)
    unused = dict.fromkeys((
        "num_kv_heads", "key", "key_stride", "value", "value_stride", "second_value", "query_norm", "query_norm_bias",
        "key_norm", "key_norm_bias", "norm_kind", "slots", "cache", "block_bytes", "head_bytes", "plane_bytes",
        "scale_bytes", "key_scale", "value_scale", "query_scales", "interleaved",
    ), 0)  # fmt: skip
    call(
        make_rotate(KV_DTYPES.index("f32")).address, ROTATE, 3, step=np.array([TOKENS], np.int64), query=query,
        query_stride=query.strides[0], num_heads=HEADS, head_size=32, cosine=np.cos(angles).astype(np.float32),
        sine=np.sin(angles).astype(np.float32), rotary=32, eps=0.0, block_size=32, value_eps=0.0, **unused,
    )  # fmt: skip
    np.testing.assert_allclose(query.reshape(expected.shape), expected, atol=2e-6, rtol=2e-6)
