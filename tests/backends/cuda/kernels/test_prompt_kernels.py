"""Kernels of steps with many tokens beside float64, their outputs poisoned: on a GPU, or interpreted without one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends.cuda.kernel_sizes import (  # noqa: E402
    ACTIVATIONS,
    WidthCut,
    gate_blocks,
    norm_blocks,
    norm_square_parts,
    width_in_blocks,
)
from realizar.backends.cuda.kernels.activate import SIGMOID  # noqa: E402
from realizar.backends.cuda.kernels.gate_heads import gate_heads  # noqa: E402
from realizar.backends.cuda.kernels.normalize import normalize_block  # noqa: E402
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, InputFormat  # noqa: E402
from realizar.backends.cuda.matmul.routing import split_weights, start_scores  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")]),
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="interpreted only where there is no GPU")),
]
pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    # rows are written before their power of two is known
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def poisoned_halves(tokens: int, cols: int, device: str) -> object:
    buffer = ActivationBuffers(tokens, torch.device(device)).get(InputFormat("half", 16), cols)
    buffer.values.fill_(float("nan"))
    buffer.scales.fill_(float("nan"))
    return buffer


def rows_of(buffer: object, tokens: int) -> torch.Tensor:
    """float64 [tokens, cols] of halves in the tensor cores' order."""
    blocks, chunks, _, runs, _, _ = buffer.values.shape
    values = buffer.values.double().view(blocks, chunks, 4, 2, runs, 8, 4, 2)  # core / 2, core % 2, ..., place / 2, % 2
    rows = values.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(blocks * runs * 8, chunks * 64)
    return (rows * buffer.scales.double()[: len(rows), None])[:tokens, : buffer.cols]


def gated(cut: WidthCut, cols: int, head: int, norm: bool, device: str) -> tuple[object, torch.Tensor]:
    """What `gate_heads` writes, by a cut, and what it should."""
    tokens, gate_at, splits = 5, 64, 2
    torch.manual_seed(1)
    source, weight = torch.randn(tokens, cols), torch.randn(head)
    partials, bias = torch.randn(splits, tokens, gate_at + cols), torch.randn(gate_at + cols)
    source[1] *= 1e-7
    if not norm:
        source[2] *= 1e6
    buffer = poisoned_halves(tokens, cols, device)
    state = [torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2)]
    on_device = [each.to(device) for each in (source, partials, bias, weight)]
    gate_heads[(tokens, cut.blocks)](
        on_device[0], cols, on_device[1], partials.stride(0), partials.stride(1), on_device[2], gate_at, on_device[3],
        1e-6, cols, *buffer.pointers(), *state, SPLITS=splits, BIAS=True, NORM=norm, HEAD=head,
        KIND=SIGMOID.value if norm else ACTIVATIONS["silu"], WHOLE=cut.blocks == 1, BLOCK=cut.block,
        num_warps=cut.warps, DEPENDENT=False, **buffer.constants(),
    )  # fmt: skip
    gate = partials.double().sum(0)[:, gate_at:] + bias.double()[gate_at:]
    x = source.double()
    if norm:
        heads = x.view(tokens, -1, head)
        x = (heads / (heads.square().mean(2, keepdim=True) + 1e-6).sqrt() * weight.double()).view(tokens, cols)
    return buffer, x * torch.nn.functional.silu(gate)


@pytest.mark.parametrize(
    ("cols", "head", "norm"), [(4096, 128, True), (6144, 128, True), (640, 64, True), (576, 64, False)]
)
def test_a_whole_token_is_gated_as_its_blocks_are(cols: int, head: int, norm: bool, device: str) -> None:
    """By one program, in steps of many tokens, or by one for each 256 columns: the same bits."""
    few, many = width_in_blocks(cols), gate_blocks(cols, 300)
    assert gate_blocks(cols, 256) == few != many
    (whole, wanted), (blocks, _) = gated(many, cols, head, norm, device), gated(few, cols, head, norm, device)
    found = rows_of(whole, 5).cpu()
    assert float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) < 5e-4
    assert torch.equal(found, rows_of(blocks, 5).cpu())
    assert torch.equal(whole.scales[:5], blocks.scales[:5])


def test_halves_of_pairs_are_added_to_the_stream(device: str) -> None:
    """Outputs of experts as float16, divided by a power of two: added in float32, in the order of slots."""
    tokens, slots, cols, scale = 5, 3, 2048, 0.5
    torch.manual_seed(2)
    outputs, stream, weight = torch.randn(tokens, slots, cols) * 100, torch.randn(tokens, cols), torch.randn(cols)
    halves = (outputs / HALF_FACTOR.value).half()
    cut, parts, buffer = norm_blocks(cols), norm_square_parts(cols), poisoned_halves(tokens, cols, device)
    partials, hidden = halves.to(device).transpose(0, 1), stream.to(device, copy=True)
    before, sums = torch.ones(tokens, parts, device=device), torch.full((tokens, parts), torch.nan, device=device)
    normalize_block[(tokens, cut.blocks)](
        partials, partials.stride(0), partials.stride(1), hidden, scale, hidden, cols, weight.to(device),
        *buffer.pointers(), cols, sums, before, SPLITS=slots, MATMUL_BIAS=False, DEPENDENT=False, PARTS=parts,
        BLOCK=cut.block, num_warps=cut.warps, **buffer.constants(),
    )  # fmt: skip
    added = torch.zeros(tokens, cols)
    for slot in range(slots):
        added += halves[:, slot].float()
    assert torch.equal(hidden.cpu(), stream + scale * (added * HALF_FACTOR.value))
    wanted = hidden.cpu().double()
    assert torch.allclose(sums.cpu().double()[:, : cut.blocks].sum(1), wanted.square().sum(1), rtol=1e-5)
    assert torch.allclose(rows_of(buffer, tokens).cpu(), wanted * weight.double(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("tokens", "experts", "width"), [(70, 40, 328), (300, 256, 2048), (4200, 130, 192)])
def test_scores_of_the_stream(tokens: int, experts: int, width: int, device: str) -> None:
    """Float32's digits of float64's scores, also where rows are large, tiny or mixed; NaN stays in its row; nothing
    else is written."""
    torch.manual_seed(3)
    x, weights = torch.randn(tokens, width), torch.randn(experts, width) * 0.1
    x[1] *= 1e4
    x[2] *= 1e-3
    x[3] *= torch.logspace(-4, 4, width)
    weights[1] *= torch.logspace(-4, 4, width)
    x[5, 7] = torch.nan
    out = torch.full((tokens + 1, experts), -7.0, device=device)
    start_scores(x.to(device), split_weights(weights.to(device)), 1e-5, out[:tokens])
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    found, wanted = out.cpu().double(), exact @ weights.double().T
    assert bool((found[tokens] == -7).all())
    assert bool(found[5].isnan().all())
    error, size = (found[:tokens] - wanted).abs(), exact.abs() @ weights.double().abs().T
    live = [row for row in range(tokens) if row != 5]
    assert float((error / size)[live].max()) < 3e-7
