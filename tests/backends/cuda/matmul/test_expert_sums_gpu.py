"""Down of few tokens on a GPU, which adds a token's experts to the residual stream: as in exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.matmul.stored_inputs import DEVICE, near, read_integers, stored  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.matmul import experts as expert_matmuls  # noqa: E402
from realizar.backends.cuda.matmul.experts import ExpertMatmuls, Pairs  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulKernels  # noqa: E402
from realizar.backends.cuda.matmul.residual import Residual, epilogue_square_parts  # noqa: E402
from realizar.backends.cuda.weights.experts import ExpertLoader, ExpertsPlan, PackedExperts  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import Packer  # noqa: E402
from realizar.backends.weight_tensors import WeightTensors  # noqa: E402
from realizar.models.spec import Experts  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weights", ["Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize(
    ("hidden", "width", "per_token"), [(2048, 768, 8), (2880, 192, 4), (256, 128, 1), (2048, 512, 9)]
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_sums(
    monkeypatch: pytest.MonkeyPatch, weights: str, hidden: int, width: int, per_token: int, has_norm: bool
) -> None:
    """Down that adds a token's weighted experts to the stream and begins the next norm; a token of padding stays."""
    monkeypatch.setattr(expert_matmuls, "_SUM_BLOCKS", 8)
    if weights != "MXFP4" and width % 256:
        weights = "Q5_0"
    parts, count = ("expert_biases", "clamped") if weights == "MXFP4" else (), 6 * per_token
    recipe = Recipe(
        hidden_size=hidden, feed_forward_size=width, windows=(None,), experts=count, per_token=per_token, parts=parts,
        weights="Q8_0", down_weights=weights,
    )  # type: ignore[arg-type]  # fmt: skip
    spec, checkpoint = random_model(recipe)
    part = spec.layers[0].feed_forward
    assert isinstance(part, Experts)
    tensors = WeightTensors(spec, checkpoint)
    plan = ExpertsPlan.of(part, tensors, packs=True, stacks_shared=False)
    matrices = ExpertLoader(tensors, DEVICE, Packer(DEVICE), lambda _: None).load(part, plan)
    matmuls = ExpertMatmuls(MatmulKernels(DEVICE))
    matmuls.prepare([matrices])
    assert matmuls.residual_tokens(matrices) == 3
    assert isinstance(matrices.down, PackedExperts)
    down = np.stack([tensors.expert(part.down.weight, e).dequantize() for e in range(count)]).astype(np.float64)
    bias = tensors.expert_vectors(part.down.bias) if part.down.bias else np.zeros((count, hidden))
    rng = np.random.default_rng(3)
    for rows in (1, 3):
        chosen = np.stack([rng.permutation(count)[:per_token] for _ in range(rows)]).astype(np.int32)
        chosen[2:] = -1
        factors = rng.random((rows, per_token)).astype(np.float32)
        flat = torch.from_numpy(chosen.reshape(-1)).cuda(), torch.from_numpy(factors.reshape(-1)).cuda()
        source, x = stored(rng.standard_normal((rows * per_token, width)), "int8")
        stream = rng.standard_normal((rows, hidden)).astype(np.float32)
        gain = rng.standard_normal(hidden).astype(np.float32)
        target, _ = stored(np.zeros((rows, hidden)), "int8")
        residual = Residual(
            torch.from_numpy(stream).cuda(), None, 0.7, torch.from_numpy(gain).cuda() if has_norm else None,
            target if has_norm else None,
            torch.zeros((rows, epilogue_square_parts(hidden)), device=DEVICE),
        )  # fmt: skip
        matmuls.experts_read.forget()
        matmuls.add(matrices.down, matrices.down_bias, source, Pairs(*flat, per_token), residual, rows)
        live = min(rows, 2)
        sums = np.einsum("rsoi,rsi->rso", down[chosen[:live]], x.reshape(rows, per_token, width)[:live])
        added = ((sums + bias[chosen[:live]]) * factors[:live, :, None]).sum(axis=1)
        found = residual.hidden.cpu().numpy()
        near(found[:live] - stream[:live], 0.7 * added, 2e-3)
        assert (found[live:] == stream[live:]).all()
        assert matmuls.experts_read.average() == len(np.unique(chosen[:live]))
        written, square_sums = read_integers(target), residual.square_sums.double().cpu().numpy()
        if has_norm:
            near(written[:live], (found * gain)[:live].astype(np.float64), 8e-3)
            near(square_sums[:live].sum(axis=1), np.square(found[:live], dtype=np.float64).sum(axis=1), 1e-5)
        assert not written[live:].any()
        assert not square_sums[live:].any()
        assert has_norm or not (written.any() or square_sums.any())
