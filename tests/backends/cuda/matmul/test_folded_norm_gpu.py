"""Norms in blocks of columns and the matmuls that finish them, in turn on a GPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from realizar.backends.cuda.kernel_sizes import norm_blocks, norm_square_parts  # noqa: E402
from realizar.backends.cuda.kernels.normalize import normalize_block  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, FoldedNorm  # noqa: E402
from realizar.backends.cuda.matmul.quantized import (  # noqa: E402
    MatmulKernels,
)
from realizar.backends.cuda.weights.pack import PackedMatrix  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import pack_by_threads  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.quantization.block_source import block_source  # noqa: E402
from realizar.quantization.random_blocks import random_blocks  # noqa: E402

pytestmark = pytest.mark.gpu
EPS, LAYERS, SCALE = 1e-5, 6, 0.3


@dataclass
class Model:
    """A square matrix, a norm before it, and a stream that it is added to, layer after layer."""

    matmuls: MatmulKernels
    matrix: PackedMatrix
    exact: torch.Tensor
    weight: torch.Tensor

    def exact_stream(self, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        hidden, added = hidden.double(), first.double()
        for _ in range(LAYERS):
            hidden = hidden + SCALE * added
            root = (hidden.square().mean(1, keepdim=True) + EPS).sqrt()
            added = (hidden * self.weight.double() / root) @ self.exact.T
        return hidden

    def stream(self, start: torch.Tensor, first: torch.Tensor, dependent: bool) -> torch.Tensor:
        """The same by kernels, in buffers full of NaN."""
        tokens, cols = start.shape
        config = replace(self.matmuls.route(tokens, self.matrix), dependent=dependent)
        cut, parts = norm_blocks(cols), norm_square_parts(cols)
        buffer = ActivationBuffers(tokens, torch.device("cuda")).get(config.format, cols)
        for tensor in (buffer.values, buffer.scales, buffer.terms):
            tensor.fill_(torch.nan)
        hidden, none = start.clone(), torch.zeros(1, device="cuda")
        square_sums = torch.full((2, tokens, parts), torch.nan, device="cuda")
        square_sums[:, :, cut.blocks :] = 0.0
        square_sums[1] = 0.0
        square_sums[1, :, 0] = start.square().sum(1)
        partials = torch.full((config.splits, tokens, cols), torch.nan, device="cuda")
        launching = {"DEPENDENT": True, "launch_pdl": True} if dependent else {"DEPENDENT": False}
        sums = first.unsqueeze(0).contiguous()
        for layer in range(LAYERS):
            before, after = square_sums[1 - layer % 2], square_sums[layer % 2]
            normalize_block[(tokens, cut.blocks)](
                sums, sums.stride(0), sums.stride(1), none, SCALE, hidden, cols, self.weight,
                *buffer.pointers(), cols, after, before, SPLITS=len(sums), MATMUL_BIAS=False, PARTS=parts,
                BLOCK=cut.block, num_warps=cut.warps, **buffer.constants(), **launching,
            )  # fmt: skip
            x = buffer.with_norm(FoldedNorm(after, cols, EPS))
            self.matmuls.launch(self.matrix, x, partials, tokens, config)
            sums = partials
        return hidden


@pytest.fixture(scope="module", params=[512, 2048, 5120])
def model(request: pytest.FixtureRequest) -> Model:
    cols, rng = request.param, np.random.default_rng(1)
    data = random_blocks(GGMLType.Q4_K, cols, cols, rng, 1 / np.sqrt(cols))
    source = block_source(GGMLType.Q4_K, data, cols, cols)
    weight = torch.from_numpy((1 + 0.3 * rng.standard_normal(cols)).astype(np.float32)).cuda()
    exact = torch.from_numpy(source.dequantize()).to("cuda", torch.float64)
    return Model(MatmulKernels("cuda"), pack_by_threads([source], "cuda"), exact, weight)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 33, 64, 130])
def test_chains_agree_with_exact_arithmetic(model: Model, tokens: int) -> None:
    """Streams of 1e-3 to 1e5, which grow at the first norm or do not."""
    cols = model.matrix.in_features
    sizes = 10.0 ** (torch.arange(tokens, device="cuda") % 9 - 3)[:, None]
    start, first = (sizes * torch.randn(tokens, cols, device="cuda") for _ in range(2))
    first[tokens // 2] *= 100.0
    exact = model.exact_stream(start, first)
    found = model.stream(start, first, dependent=False)
    errors = (found.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(errors.nan_to_num(torch.inf).max()) < (3e-2 if tokens <= 2 else 2e-3)


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 128])
def test_dependent_launches_equal_plain_ones(model: Model, tokens: int) -> None:
    if model.matmuls.capability < (9, 0):
        pytest.skip("from compute capability 9.0 on")
    start, first = (torch.randn(tokens, model.matrix.in_features, device="cuda") for _ in range(2))
    expected = model.stream(start, first, dependent=False)
    for _ in range(20):
        assert torch.equal(model.stream(start, first, dependent=True), expected)
