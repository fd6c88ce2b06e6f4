"""Norms whose root the matmul applies, interpreted: the kernel beside exact arithmetic, and whole models."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.packed_matmuls import decoded, run_packed  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.kernels.normalize import normalize, normalize_block  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, ActivationBuffers, FoldedNorm, InputFormat  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from wider import wider  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
CPU = torch.device("cpu")
ROWS, COLS, BLOCK, PARTS, EPS = 7, 700, 256, 8, 1e-6
FORMATS = [InputFormat("int8"), InputFormat("half", 8)]
HALF_ROUNDING, INT8_ROUNDING = 3e-4, 8e-3  # of a row of normal values


def ids(input_format: InputFormat) -> str:
    return input_format.kind


def poisoned(input_format: InputFormat) -> ActivationBuffer:
    buffer = ActivationBuffers(ROWS, CPU).get(input_format, COLS)
    for tensor in (buffer.values, buffer.scales, buffer.codes, buffer.terms):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return buffer


class Chain:
    """A residual stream and the norms between its matmuls, as the backend starts them."""

    def __init__(self, hidden: np.ndarray, weight: np.ndarray, input_format: InputFormat) -> None:
        self.hidden, self.weight = torch.from_numpy(hidden.copy()), torch.from_numpy(weight)
        self.format, self.none = input_format, torch.zeros(1)
        self.square_sums = torch.full((2, ROWS, PARTS), float("nan"))
        self.square_sums[:, :, 3:] = 0.0  # no block writes there
        self.written = 0

    def start(self) -> np.ndarray:
        """The norm of the stream as it is, a row at once: float64."""
        buffer, none = poisoned(self.format), self.none
        self.square_sums[0] = float("nan")
        normalize[(ROWS,)](
            none, 0, 0, none, none, none, none, 0.0, 0.0, 1.0, self.hidden, self.weight, none, EPS,
            *buffer.pointers(), COLS, self.square_sums[0], SPLITS=0, MATMUL_BIAS=False, BRANCH_NORM=0,
            BRANCH_BIAS=False, NORM=1, NORM_BIAS=False, GATHER=False, DEPENDENT=False, PARTS=PARTS, BLOCK=1024,
            **buffer.constants(),
        )  # fmt: skip
        return decoded(buffer, ROWS, COLS).astype(np.float64)

    def add(self, parts: np.ndarray, bias: np.ndarray, scale: float) -> np.ndarray:
        """Add splits of a matmul, leave the norm scale to the consumer, and return what it makes of it: float64."""
        buffer, partials = poisoned(self.format), torch.from_numpy(parts)
        before, square_sums = self.square_sums[self.written], self.square_sums[1 - self.written]
        self.written = 1 - self.written
        normalize_block[(ROWS, -(-COLS // BLOCK))](
            partials, partials.stride(0), partials.stride(1), torch.from_numpy(bias), scale, self.hidden, COLS,
            self.weight, *buffer.pointers(), COLS, square_sums, before, SPLITS=len(parts), MATMUL_BIAS=True,
            DEPENDENT=False, PARTS=PARTS, BLOCK=BLOCK, **buffer.constants(),
        )  # fmt: skip
        return decoded(buffer.with_norm(FoldedNorm(square_sums, COLS, EPS)), ROWS, COLS).astype(np.float64)


def normed(hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
    hidden = hidden.astype(np.float64)
    return hidden * weight / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + EPS)


def errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    return np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)


@pytest.mark.parametrize("input_format", FORMATS, ids=ids)
def test_streams_of_any_size_that_grow_and_shrink(input_format: InputFormat) -> None:
    """Rows of 1e-4 to 1e6, over norms between which they grow a hundredfold, shrink fiftyfold, and stay."""
    rng = np.random.default_rng(1)
    sizes = np.array([1e-4, 1e-3, 1e-2, 1.0, 30.0, 1e5, 1e6])[:, None]
    weight = (1.0 + 0.3 * rng.standard_normal(COLS)).astype(np.float32)
    start = (sizes * rng.standard_normal((ROWS, COLS))).astype(np.float32)
    chain, limit = Chain(start, weight, input_format), HALF_ROUNDING if input_format.kind == "half" else INT8_ROUNDING
    assert errors(chain.start(), normed(start, weight)).max() < limit
    for growth in (1.0, 100.0, 0.02, 1.0):
        parts = rng.standard_normal((3, ROWS, COLS)).astype(np.float32) * sizes.astype(np.float32)
        bias = rng.standard_normal(COLS).astype(np.float32) * 1e-5
        before = chain.hidden.numpy().astype(np.float64)
        sizes = sizes * growth
        aim = sizes * rng.standard_normal((ROWS, COLS))
        parts[2] = 2 * (aim - before) - parts[0] - parts[1] - bias  # with a scale of a half, the stream becomes `aim`
        found = chain.add(parts, bias, 0.5)
        exact = before + 0.5 * (parts.astype(np.float64).sum(axis=0) + bias)
        assert errors(chain.hidden.numpy(), exact).max() < 1e-5
        assert errors(found, normed(chain.hidden.numpy(), weight)).max() < limit, growth


def test_what_no_half_holds_is_cut_and_what_is_not_a_number_stays() -> None:
    """A row that was zero, one whose largest channel outgrows everything, and one with a NaN."""
    rng = np.random.default_rng(2)
    start = (1e-3 * rng.standard_normal((ROWS, COLS))).astype(np.float32)
    start[0] = 0.0
    weight = np.ones(COLS, np.float32)
    chain = Chain(start, weight, InputFormat("half", 8))
    chain.start()
    parts = np.zeros((1, ROWS, COLS), np.float32)
    parts[0, 0] = rng.standard_normal(COLS)
    parts[0, 1, 5] = 1e8
    parts[0, 2, 6] = np.nan
    found = chain.add(parts, np.zeros(COLS, np.float32), 1.0)
    exact = normed(chain.hidden.numpy(), weight)
    assert errors(found[:1], exact[:1]).max() < HALF_ROUNDING
    assert np.isfinite(found[1]).all()
    assert 0 < found[1, 5] < exact[1, 5]
    assert np.isnan(found[2, 6])
    assert errors(found[3:], exact[3:]).max() < HALF_ROUNDING


def test_only_adding_touches_nothing_else() -> None:
    rng = np.random.default_rng(3)
    hidden, parts = (rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, COLS), (2, ROWS, COLS)))
    stream, partials, none = torch.from_numpy(hidden.copy()), torch.from_numpy(parts), torch.full((1,), float("nan"))
    normalize_block[(ROWS, -(-COLS // BLOCK))](
        partials, partials.stride(0), partials.stride(1), none, 2.0, stream, COLS, none, none, COLS, none, none, none,
        COLS, none, none, SPLITS=2, MATMUL_BIAS=False, FORMAT=4, BLOCK_TOKENS=1, CHUNKS=1, DEPENDENT=False, PARTS=PARTS,
        BLOCK=BLOCK,
    )  # fmt: skip
    np.testing.assert_allclose(stream.numpy(), hidden + 2 * parts.sum(axis=0), rtol=1e-5, atol=1e-6)
    assert torch.isnan(none).all()


SHAPE = {"head_size": 32, "num_heads": 10, "num_kv_heads": 2, "hidden_size": 320, "feed_forward_size": 96}
MODELS = {
    "plain": (Recipe(**SHAPE, vocab_size=48, weights="Q8_0", windows=(None, 5), parts=("biases",)), 4),
    "post_norms": (Recipe(**SHAPE, vocab_size=48, weights="Q8_0", windows=(None,), parts=("post_norms",)), 0),
    "layer_norm": (Recipe(**SHAPE, vocab_size=48, weights="Q4_0", windows=(None,), parts=("layer_norm",)), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", wider(MODELS, "plain"))
def test_models_over_matmuls_that_apply_norm_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, single tokens and two rows use both formats. All norms but the first are folded where they may be."""
    recipe, norms = MODELS[name]
    matmuls = run_packed(monkeypatch, splits=2)
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16"
    )
    runner = GPURunner(spec, checkpoint, config)
    tokens, others = random_tokens(recipe, 14, 1), random_tokens(recipe, 6, 2)
    first, second = runner.request(0, tokens), runner.request(1, others, first=1)
    runner.step([(first, 12)])
    launched = len(matmuls.norms)
    runner.step([(first, 1)])
    runner.step([(first, 1), (second, 6)])
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    for request in (first, second):
        assert errors(request.values(), reference.logits(request.token_ids)).max() < 0.02
    layers = len(recipe.windows)
    # QKV, O, gate with up, and down of each layer, then the head
    assert matmuls.norms[: 4 * layers].count(True) == max(0, norms - 1) == matmuls.norms[:launched].count(True)
    runner.close()
