"""The norm kernel and the quantisation of its rows against float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu.kernels.kernel_calls import call, poisoned
from backends.cpu.kernels.record_checks import WIDTH, check_records, poisoned_records, read_records, rows_of
from realizar.backends.cpu.kernels.normalize import LAYER_NORM, NO_NORM, NORMALIZE, RMS_NORM, normalize

EPS = 1e-5


def expected_norm(
    x: NDArray[np.float32], kind: int, weight: NDArray[np.float32], bias: NDArray[np.float32] | None
) -> NDArray[np.float64]:
    y = x.astype(np.float64)
    if kind == NO_NORM:
        return y
    if kind == LAYER_NORM:
        y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * weight
    return y if bias is None else y + bias


class Norm:
    """Inputs and outputs of one call. Rows are padded to whole groups, as buffers of a step are."""

    def __init__(self, tokens: int, width: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.width, self.padded = width, -(-width // 32) * 32
        self.x = np.zeros((tokens, self.padded), np.float32)
        self.x[:, :width] = 3 * rng.standard_normal((tokens, width)) + 0.5
        self.weight, self.bias = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
        self.residual = rng.standard_normal((tokens, self.padded)).astype(np.float32)
        self.out = poisoned(tokens, self.padded)
        self.out[:, width:] = 0
        self.groups = self.padded // 32
        self.records, self.terms = poisoned_records(tokens, self.groups), poisoned_records(2 * tokens, self.groups)

    def run(
        self, kind: int, bias: bool = False, residual: float = 0.0, quantise: bool = True, second: bool = False
    ) -> None:
        call(
            normalize.address, NORMALIZE, 2, step=np.array([0, len(self.x)], np.int64), count_field=1, input=self.x,
            input_stride=self.x.strides[0], width=self.width, kind=kind, eps=EPS, weight=self.weight,
            bias=self.bias if bias else 0, out=self.out, out_stride=self.out.strides[0],
            records=self.records if quantise else 0, records_groups=self.groups, records_width=WIDTH,
            residual=self.residual if residual else 0, residual_stride=self.residual.strides[0],
            residual_scale=float(residual), terms=self.terms if second else 0,
        )  # fmt: skip


@pytest.mark.parametrize("width", [1, 31, 32, 33, 576, 2880])
@pytest.mark.parametrize(
    ("kind", "bias"), [(RMS_NORM, False), (LAYER_NORM, True), (LAYER_NORM, False), (NO_NORM, False)]
)
def test_norm_and_records(kind: int, bias: bool, width: int) -> None:
    norm = Norm(3, width)
    norm.run(kind, bias)
    expected = expected_norm(norm.x[:, :width], kind, norm.weight, norm.bias if bias else None)
    scale = np.abs(norm.weight) * 4 + np.abs(norm.bias) if kind != NO_NORM else 1.0
    assert np.max(np.abs(norm.out[:, :width] - expected) / scale) <= 1e-6
    check_records(rows_of(norm.records, 3), norm.out)


@pytest.mark.parametrize("kind", [RMS_NORM, NO_NORM])
def test_residual_gets_the_scaled_result(kind: int) -> None:
    norm = Norm(4, 96)
    before = norm.residual.astype(np.float64)
    norm.run(kind, residual=0.22, quantise=False)
    expected = before[:, :96] + np.float32(0.22) * expected_norm(norm.x, kind, norm.weight, None)
    np.testing.assert_allclose(norm.residual, expected, atol=3e-6)
    assert (norm.records == 0xFF).all()


def test_second_term_holds_what_the_first_leaves() -> None:
    norm = Norm(5, 576)
    norm.run(RMS_NORM, second=True)
    terms = rows_of(norm.terms, 10)
    rest = check_records(rows_of(norm.records, 5), norm.out)
    np.testing.assert_array_equal(terms[0::2], rows_of(norm.records, 5))
    codes, scales = read_records(terms[1::2])
    np.testing.assert_allclose(scales, np.abs(rest).max(-1) / 127, rtol=1e-3)
    left = rest - scales[..., None].astype(np.float64) * codes
    assert np.max(np.abs(left)) <= np.max(np.abs(norm.out)) / 127 / 254 * 0.51


def test_zeros_quantise_to_zeros() -> None:
    norm = Norm(2, 64)
    norm.x[:] = 0
    norm.run(RMS_NORM, second=True)
    codes, scales = read_records(rows_of(norm.terms, 4))
    assert not codes.any()
    assert not scales.any()
