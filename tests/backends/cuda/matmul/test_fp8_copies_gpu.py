"""FP8 copies on a GPU that has FP8: against float64, and whole models against references of the same roundings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU of compute capability 8.9 or more", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.fp8_cases import (  # noqa: E402
    awkward_rows,
    check_copy,
    check_rows,
    converted,
    exact_weights,
    raw_matrix,
    row_errors,
)
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.device import open_device  # noqa: E402
from realizar.backends.cuda.matmul.fp8_copies import FP8Copy, copy_matrices, prepare_copying, sum_type  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulKernels  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import Packer  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402

pytestmark = pytest.mark.gpu
HALF_ROUNDING = 2.0**-11  # of weights on their way through the packed matmul
RECIPE = Recipe(
    64, 8, 2, hidden_size=512, feed_forward_size=1024, vocab_size=320, weights="Q4_K", windows=(None, 100),
    context_length=1024,
)  # fmt: skip


@pytest.mark.parametrize(
    ("types", "cols", "interleaved"),
    [
        (["Q4_K", "Q6_K"], 1024, False),
        (["Q4_K", "Q4_K"], 512, True),
        (["Q8_0"], 4160, False),
        (["IQ4_NL"], 96, False),
        (["Q2_K", "Q3_K", "Q5_K"], 768, False),
        (["IQ2_XS"], 512, False),
    ],
)
def test_copies_beside_float64(types: list[str], cols: int, interleaved: bool) -> None:
    matmuls, packer = MatmulKernels("cuda"), Packer("cuda")
    parts = [raw_matrix(GGMLType[name], 192, cols, seed) for seed, name in enumerate(types)]
    packed = [packer.pack(parts, interleaved=True)] if interleaved else [packer.pack([part]) for part in parts]
    prepare_copying(matmuls, packed)
    check_copy(copy_matrices(matmuls, packed, torch.bfloat16), exact_weights(parts, interleaved), HALF_ROUNDING)


@pytest.mark.parametrize("cols", [64, 700, 14336])
def test_rows_as_torch_rounds_them(cols: int) -> None:
    """Rows equal torch's but for quotients that the device rounds the other way."""
    x = awkward_rows(cols, torch.device("cuda"))
    check_rows(converted(x), x, ulps=1)


@pytest.mark.parametrize("rows", [128, 200, 512, 2048])
@pytest.mark.parametrize(("width", "cols"), [(336, 96), (6144, 4096)])
def test_matmuls_scaled_by_token(rows: int, width: int, cols: int) -> None:
    """Sums in `sum_type` and bfloat16, eagerly and in a graph, agree with float64; nothing is written beyond them."""
    x = torch.randn((rows, cols), device="cuda")
    x[1] = 0.0
    x[2] *= 1e20
    buffer = converted(x)
    codes = (torch.randn((width, cols), device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(width, device="cuda") + 0.5
    operand = buffer.values.view(torch.float8_e4m3fn).double() * buffer.scales[:, None].double()
    exact = operand @ (codes.double() * scales[:, None].double()).T
    for out in {sum_type(open_device()), torch.bfloat16}:
        copy = FP8Copy(codes, scales, out)
        room = torch.full((rows + 1, width), torch.nan, device="cuda")
        sums = room[None, :rows]
        copy.multiply(buffer, rows, sums)
        error = (sums[0] - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30)
        assert float(error.max()) < 0.02, out  # sums are of 14 bits or so; NaN where something was not written
        assert bool(room[rows].isnan().all())
        once, graph = sums.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            copy.multiply(buffer, rows, sums)
        sums.fill_(torch.nan)
        graph.replay()
        assert torch.equal(sums, once)


MODELS = {
    "gated": RECIPE,
    "mixed": dataclasses.replace(RECIPE, weights="Q6_K", parts=("biases", "qk_norm"), activation="gelu_tanh"),
    "post_norms": dataclasses.replace(RECIPE, weights="Q8_0", parts=("post_norms", "sinks"), windows=(None,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Chunks, chunks beside a decode, many single tokens at once and few: as far from exact as FP8 is, and no farther.

    About 0.1 in the mean by a reference whose operands are rounded so; without copies it is 0.01.
    """
    recipe, rows = MODELS[name], 130
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        max_running=rows, max_step_tokens=640, kv_cache_bytes=256 << 20, context_length=256, fp8_copies=True
    )
    runner = GPURunner(spec, checkpoint, config)
    assert min(runner.capacity.num_blocks) >= 8 * rows
    assert runner.capacity.weight_bytes > 1.9 * runner.capacity.weight_bytes_per_token
    requests = [runner.request(row, random_tokens(recipe, 256, row), first=8 * row) for row in range(rows)]
    first, second = requests[:2]
    runner.step([(first, 200)])
    runner.step([(first, 1), (second, 179)])
    for start in range(2, rows, 64):
        runner.step([(request, 3) for request in requests[start : start + 64]])
    runner.step([(request, 1) for request in requests])
    runner.step([(first, 1), (second, 1)])
    exact = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    for request in requests[:3] + requests[3::40]:
        errors = row_errors(request.values(), exact.logits(request.token_ids[: request.computed]))
        assert 0.03 < errors.mean() <= 0.2
        assert errors.max() <= 0.45
    runner.close()
