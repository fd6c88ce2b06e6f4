"""A layout of no ggml type on CUDA: both packed forms of it, a linear and an embedding, and whole models of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.packed_experts import run_packed_experts  # noqa: E402
from backends.cuda.matmul.packed_matmuls import run_packed  # noqa: E402
from backends.grouped_format import write_grouped_model  # noqa: E402
from backends.grouped_source import exact_weights, grouped_layout, grouped_model, grouped_source  # noqa: E402
from quantization.stored_checkpoints import Stored, write_model  # noqa: E402
from random_models import Recipe, random_tokens  # noqa: E402
from realizar.backends.cuda.device import interpreter_device  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers  # noqa: E402
from realizar.backends.cuda.matmul.linears import MergedLinear  # noqa: E402
from realizar.backends.cuda.plan import plan_memory  # noqa: E402
from realizar.backends.cuda.weights.plain import pack_plain  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import UnsupportedModelError  # noqa: E402
from realizar.models.registry import build_spec  # noqa: E402
from realizar.quantization.layout import WeightLayout  # noqa: E402
from realizar.quantization.source import PlanesSource, random_source  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from resolving import resolved  # noqa: E402
from wider import diagonal  # noqa: E402

DEVICE = interpreter_device()
RECIPE = Recipe(32, 2, 1, 128, 256, 48, windows=(None,), weights="Q4_0", parts=("biases",))
CONFIG = EngineConfig(
    threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16"
)


@pytest.mark.parametrize("group", [64, 128])
def test_linears_of_the_interpreter(group: int) -> None:
    """The linear merges a matrix and a shard side by side."""
    whole, tokens = grouped_source(40, 4 * group, group), 3
    shard = grouped_source(64, 8 * group, group, seed=1).slice_out_features(13, 47).slice_columns(2 * group, 6 * group)
    matrices = [pack_plain(source, DEVICE.torch_device) for source in (whole, shard)]
    linear, buffers = MergedLinear(matrices, None, DEVICE, None), ActivationBuffers(tokens, DEVICE.torch_device)
    (form,) = linear.input_formats(StepKind(tokens))
    x = buffers.get(form, 4 * group)
    x.values.copy_(torch.from_numpy(np.random.default_rng(4).standard_normal((tokens, 4 * group)).astype(np.float32)))
    x.scales.fill_(1.0)
    partials = torch.full((linear.splits(StepKind(tokens)), tokens, linear.width), float("nan"))
    linear.launch(StepKind(tokens), buffers.get, partials)
    weights = np.concatenate([exact_weights(whole), shard.dequantize()])
    expected = x.values.double().numpy() @ weights.T
    assert np.abs(partials.sum(dim=0).numpy() - expected).max() <= 2e-3 * np.abs(expected).max()


def check_logits(runner: GPURunner, reference: ReferenceModel) -> None:
    ids = random_tokens(RECIPE, 19)
    found, expected = runner.logits(ids, (16, 2)), reference.logits(ids)
    assert (np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max() <= 0.03


def test_a_whole_model_of_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint, reference = grouped_model(RECIPE, 64, monkeypatch)
    runner = GPURunner(spec, checkpoint, CONFIG)
    check_logits(runner, reference)
    runner.close()


def test_a_whole_model_of_packed_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = run_packed(monkeypatch)
    spec, checkpoint, reference = grouped_model(RECIPE, 64, monkeypatch)
    runner = GPURunner(spec, checkpoint, CONFIG)
    check_logits(runner, reference)
    assert all("c4" not in name and "_f16" in name for name in launched.names)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"), 1 << 30)
    assert plan.weight_bytes == runner.capacity.weight_bytes
    runner.close()


def check_stored(folder: Path, weights: Mapping[str, NDArray[np.float64]], *, plans: bool) -> None:
    """A model reads the numbers that were written; `plans`: it takes the memory that is planned, as packed ones do."""
    checkpoint = open_checkpoint(folder)
    spec = build_spec(checkpoint)
    tensors = load_tensors(spec, checkpoint)
    runner = GPURunner(spec, checkpoint, CONFIG)
    check_logits(runner, ReferenceModel(spec, tensors, np.float64))
    name = "model.layers.1.self_attn.o_proj.weight"
    np.testing.assert_allclose(tensors[name], weights[name], rtol=1e-6, atol=1e-7)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"), 1 << 30)
    assert not plans or plan.weight_bytes == runner.capacity.weight_bytes
    runner.close()


@pytest.mark.parametrize("order", ["words", "bytes"])
def test_a_model_that_a_checkpoint_stores_as_several_tensors_a_matrix(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_stored(tmp_path, write_grouped_model(tmp_path, order, monkeypatch), plans=False)


@pytest.mark.parametrize(
    ("stored", "packed"),
    diagonal(
        [
            Stored("awq"), Stored("fp8", scale="float32"), Stored("gptq", symmetric=True, group=32),
            Stored("float", group=0, rows=1), Stored("unpacked", bits=8, symmetric=True), Stored("modelopt"),
            Stored("gptq", bits=8), Stored("unpacked", bits=8), Stored("mxfp8", group=32, rows=1, scale="uint8"),
            Stored("mxfp4"), Stored("gptq", group=32, ordered=True),
        ],
        [True, False],
    ),
    ids=str,
)  # fmt: skip
def test_a_model_of_stored_tensors(
    stored: Stored, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packed:
        run_packed(monkeypatch)
    check_stored(tmp_path, write_model(tmp_path, stored), plans=packed)


@pytest.mark.parametrize("shared", [False, True])
def test_a_mixture_of_stored_tensors(shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_packed(monkeypatch)
    run_packed_experts(monkeypatch)
    check_stored(tmp_path, write_model(tmp_path, Stored("fp8"), mixture=True, shared=shared), plans=True)


def test_a_model_in_a_layout_that_no_kernel_expresses_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint, _ = grouped_model(RECIPE, 64, monkeypatch, bits=7)
    named = r"^tensor 'layers\.0\.q\.weight': weights in the layout GROUPED64 do not run on CUDA: codes have 7 bits$"
    with pytest.raises(UnsupportedModelError, match=named):
        plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"), 1 << 30)
    run_packed(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=named):
        GPURunner(spec, checkpoint, CONFIG)


def test_codes_that_triton_kernels_do_not_read_are_refused() -> None:
    layout = WeightLayout("SEVEN", 32, 30, bits=7, group_size=32)
    planes = random_source(layout, 8, 64, np.random.default_rng(1), 0.1).planes(0, 8)
    with pytest.raises(UnsupportedModelError, match="layout SEVEN do not run on CUDA: codes have 7 bits"):
        pack_plain(PlanesSource(layout, planes), DEVICE.torch_device)
    assert grouped_layout(64).row_bytes(128) == 2 * 36
