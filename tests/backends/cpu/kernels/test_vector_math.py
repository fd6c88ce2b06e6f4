"""exp, tanh, erf and the activations on vectors, against float64 on a wide grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from backends.cpu.kernels.kernel_calls import call, poisoned
from backends.cpu.kernels.record_checks import WIDTH, check_records, poisoned_records, rows_of
from realizar.backends.cpu.codegen.vector_math import CLAMPED, VectorMath
from realizar.backends.cpu.emitted import Value, emitted
from realizar.backends.cpu.kernels.activate import ACTIVATE, make_activate
from realizar.backends.cpu.kernels.quantize import ACTIVATIONS

FUNCTIONS = ("exp", "tanh", "erf")
LANES = 16


@emitted
def apply(builder: Any, function: int, source: Value, target: Value) -> None:
    """target[lanes] = function(source[lanes]), by address."""
    e = VectorMath(builder, LANES)
    e.store(getattr(e, FUNCTIONS[function])(e.load(source, e.f32, 4)), target)


@njit
def apply_exp(x: Any, y: Any) -> None:
    for i in range(0, x.size, LANES):
        apply(0, x.ctypes.data + 4 * i, y.ctypes.data + 4 * i)


@njit
def apply_tanh(x: Any, y: Any) -> None:
    for i in range(0, x.size, LANES):
        apply(1, x.ctypes.data + 4 * i, y.ctypes.data + 4 * i)


@njit
def apply_erf(x: Any, y: Any) -> None:
    for i in range(0, x.size, LANES):
        apply(2, x.ctypes.data + 4 * i, y.ctypes.data + 4 * i)


def grid(limit: float) -> NDArray[np.float32]:
    """Values of both signs, evenly spaced and in powers of two down to denormals, and zero."""
    even = np.linspace(-limit, limit, 200_000)
    powers = 2.0 ** np.linspace(-140, math.log2(limit), 20_000)
    values = np.concatenate([even, powers, -powers, [0.0]]).astype(np.float32)
    return np.concatenate([values, np.zeros(-values.size % LANES, np.float32)])


def test_exp() -> None:
    x = grid(87.0)
    y = poisoned(x.size)
    apply_exp(x, y)
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(y - expected) / expected) <= 2.5e-7


def test_exp_saturates() -> None:
    x = np.tile(np.float32([-np.inf, -1e30, -200, -87.5, 88.5, 200, 1e30, np.inf]), 2)
    y = poisoned(x.size)
    apply_exp(x, y)
    low, high = np.exp(-87.0), np.exp(88.0)
    np.testing.assert_allclose(y, np.tile([low] * 4 + [high] * 4, 2), rtol=1e-6)


def test_tanh() -> None:
    x = np.concatenate([grid(1.0), grid(30.0), grid(1e4)])
    y = poisoned(x.size)
    apply_tanh(x, y)
    expected = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(y - expected)) <= 2e-7
    near = (np.abs(x) > 1e-30) & (np.abs(x) < 1)
    assert np.max(np.abs(y - expected)[near] / np.abs(expected[near])) <= 1e-6


def test_erf() -> None:
    x = np.concatenate([grid(1.0), grid(30.0)])
    y = poisoned(x.size)
    apply_erf(x, y)
    expected = np.array([math.erf(value) for value in x.astype(np.float64)])
    assert np.max(np.abs(y - expected)) <= 6e-7


def expected_activation(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "relu_squared":
        return np.maximum(x, 0) ** 2
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.array([0.5 * v * (1 + math.erf(v * math.sqrt(0.5))) for v in x.ravel()]).reshape(x.shape)


def expected_gated(name: str, gate: NDArray[np.float64], up: NDArray[np.float64]) -> NDArray[np.float64]:
    if name != CLAMPED:
        return expected_activation(name, gate) * up
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize(
    ("name", "gated"), [(name, gated) for name in ACTIVATIONS for gated in (False, True) if gated or name != CLAMPED]
)
def test_activate_kernel(name: str, gated: bool) -> None:
    """Five tokens of three groups on three threads; values far past saturation among them."""
    rng = np.random.default_rng(1)
    tokens, groups = 5, 3
    gate = (rng.standard_normal((tokens, 32 * groups)) * np.exp(rng.uniform(-6, 4, (tokens, 1)))).astype(np.float32)
    up = rng.standard_normal(gate.shape).astype(np.float32)
    out, records = poisoned(*gate.shape), poisoned_records(tokens, groups)
    step = np.array([tokens], np.int64)
    call(
        make_activate(ACTIVATIONS.index(name), int(gated)).address, ACTIVATE, 3, step=step, count_field=0, gate=gate,
        up=up if gated else gate, input_stride=gate.strides[0], groups=groups, out=out, out_stride=out.strides[0],
        records=records, records_groups=groups, records_width=WIDTH, source_groups=3, block_bytes=1 << 20,
    )  # fmt: skip
    gates = gate.astype(np.float64)
    expected = expected_gated(name, gates, up.astype(np.float64)) if gated else expected_activation(name, gates)
    factor = np.abs(up) + (name == CLAMPED) if gated else 1.0
    scale = np.maximum(np.abs(gate), 1e-3) * factor  # a cancelled gelu is near zero
    assert np.max(np.abs(out - expected) / np.maximum(scale, np.abs(expected))) <= 4e-7
    check_records(rows_of(records, tokens), out)
