"""The Triton kernel that writes activations against the formats' numpy reference: on a GPU, or interpreted."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from backends.cuda.layouts.activation_values import half_activations, int8_activations
from realizar.backends.cuda.kernels.activate import convert
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, InputFormat

BLOCK = 128


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # stored as it is, then divided
@pytest.mark.parametrize("form", [InputFormat("int8"), *(InputFormat("half", block) for block in (1, 8, 80))], ids=str)
@pytest.mark.parametrize("cols", [128, 320])
def test_triton_writes_the_format(form: InputFormat, cols: int) -> None:
    rows = 70 if form.block_tokens == 80 else 11
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = np.random.default_rng(cols).standard_normal((rows, cols)).astype(np.float32)
    x[3] *= 1e6
    x[4, :48] = 0
    buffer = ActivationBuffers(rows, device).get(form, cols)
    source = torch.from_numpy(x).to(device)
    counters = torch.zeros((2, rows), dtype=torch.int32, device=device)
    convert[(rows, -(-cols // BLOCK))](
        source, cols, cols, buffer.values, cols, buffer.scales, buffer.codes, buffer.terms, counters[0], counters[1],
        DEPENDENT=False, BLOCK=BLOCK, **buffer.constants(),
    )  # fmt: skip
    if form.kind == "int8":
        codes, terms = int8_activations(x)
        assert np.abs(buffer.codes[:rows].cpu().numpy().astype(int) - codes).max() <= 1  # a division's last bit
        seen = buffer.terms[:rows].cpu().numpy()
        np.testing.assert_allclose(seen[..., 0], terms[..., 0], rtol=1e-6)
        sums = buffer.codes[:rows].cpu().numpy().reshape(rows, -1, 16).sum(axis=2, dtype=np.int64)
        np.testing.assert_allclose(seen[..., 1], seen[..., 0] * sums, rtol=1e-5, atol=1e-6)
    else:
        values, scales = half_activations(x, form.block_tokens)
        assert np.array_equal(buffer.scales[:rows].cpu().numpy(), scales[:rows])
        assert np.array_equal(buffer.values.cpu().numpy().view(np.uint16), values.view(np.uint16))
