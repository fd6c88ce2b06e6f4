"""FP8 copies without a GPU: beside float64, in whole models over twins of the matmuls, in plans, and refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.fp8_cases import (  # noqa: E402
    FP8Reference,
    awkward_rows,
    check_copy,
    check_rows,
    converted,
    exact_weights,
    poisoned_rows,
    raw_matrix,
    row_errors,
)
from backends.cuda.matmul.packed_matmuls import HostPacker, run_packed  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cpu.runner import CPUBackend  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile, interpreter_device  # noqa: E402
from realizar.backends.cuda.kernels.activate import activate  # noqa: E402
from realizar.backends.cuda.kernels.normalize import normalize  # noqa: E402
from realizar.backends.cuda.matmul import fp8_copies, linears, tuning_table  # noqa: E402
from realizar.backends.cuda.matmul.fp8_copies import FP8Copy, check_device, copy_matrices, sum_type  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, InputFormat  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulKernels  # noqa: E402
from realizar.backends.cuda.plan import plan_memory  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.cli.main import app, run_app  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import InvalidRequestError, UnsupportedModelError  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from resolving import resolved  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
CPU = torch.device("cpu")
SMALL = Recipe(32, 2, 1, 64, 128, 48, windows=(9,), weights="Q8_0")
CONFIG = EngineConfig(
    threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16",
    fp8_copies=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("types", "cols", "interleaved"),
    [
        (["Q8_0"], 320, False),
        (["Q4_K", "Q6_K"], 512, False),
        (["IQ4_NL", "IQ4_NL"], 96, True),
        (["IQ2_XS"], 256, False),
    ],
)
def test_copies_beside_float64(types: list[str], cols: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the order in which the packed matrices have them; columns that end within a run of 128."""
    run_packed(monkeypatch)
    matmuls, packer = MatmulKernels("cpu"), HostPacker(CPU)
    parts = [raw_matrix(GGMLType[name], 128, cols, seed) for seed, name in enumerate(types)]
    packed = [packer.pack(parts, interleaved=True)] if interleaved else [packer.pack([part]) for part in parts]
    copy = copy_matrices(matmuls, packed, torch.float32)
    assert copy.codes.shape == (128 * len(parts), cols)
    check_copy(copy, exact_weights(parts, interleaved), 0.0)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_matmuls_scaled_by_token(out: Any) -> None:
    """A matmul of kernel-written activations with a copy equals float64's; nothing is written beyond it."""
    x = torch.randn((20, 64), generator=torch.Generator().manual_seed(2))
    buffer = converted(x)
    codes = torch.randn((48, 64), generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    copy = FP8Copy(codes, torch.rand(48) + 0.5, out)
    sums = torch.full((1, 20, 48), torch.nan)
    copy.multiply(buffer, 18, sums[:, :18])
    operand = buffer.values.view(torch.float8_e4m3fn).double() * buffer.scales[:, None].double()
    exact = operand[:18] @ (codes.double() * copy.scales[:, None].double()).T
    limit = 1e-5 if out == torch.float32 else 4e-3
    assert float((sums[0, :18] - exact).norm() / exact.norm()) < limit
    assert bool(sums[0, 18:].isnan().all())


@pytest.mark.parametrize("cols", [64, 700])
def test_rows_as_torch_rounds_them(cols: int) -> None:
    x = awkward_rows(cols, CPU)
    check_rows(converted(x), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_activations(interleaved: bool) -> None:
    """Activations in FP8 equal the float32 ones rounded."""
    rows, width, none = 3, 192, torch.zeros(4, dtype=torch.int32)
    partials = torch.randn((2, rows, 2 * width), generator=torch.Generator().manual_seed(4))
    plain, rounded = ActivationBuffers(rows, CPU).get(InputFormat("f32"), width), poisoned_rows(rows, width, CPU)
    for buffer in (plain, rounded):
        activate[(rows, 1)](
            partials, partials.stride(0), partials.stride(1), none, 64 if interleaved else width, width,
            *buffer.pointers(), none, none, SPLITS=2, BIAS=False, KIND=0, GATED=True, INTERLEAVED=interleaved,
            DEPENDENT=False, BLOCK=256, **buffer.constants(),
        )  # fmt: skip
    check_rows(rounded, plain.values)


def test_norms() -> None:
    """Norms in FP8 equal the float32 ones rounded; the stream goes on in float32."""
    rows, cols, none = 3, 96, torch.zeros(1)
    partials, stream = (torch.randn((1, rows, cols), generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    weight = 1 + 0.1 * torch.arange(cols, dtype=torch.float32)
    plain, rounded = ActivationBuffers(rows, CPU).get(InputFormat("f32"), cols), poisoned_rows(rows, cols, CPU)
    streams, square_sums = [], torch.full((2, rows, 8), torch.nan)
    for turn, buffer in enumerate((plain, rounded)):
        hidden = stream[0].clone()
        normalize[(rows,)](
            partials, partials.stride(0), partials.stride(1), none, none, none, none, 0.0, 0.5, 1.0, hidden,
            weight, none, 1e-6, *buffer.pointers(), cols, square_sums[turn], SPLITS=1, MATMUL_BIAS=False, BRANCH_NORM=0,
            BRANCH_BIAS=False, NORM=1, NORM_BIAS=False, GATHER=False, DEPENDENT=False, PARTS=8, BLOCK=128,
            **buffer.constants(),
        )  # fmt: skip
        streams.append(hidden)
    assert torch.equal(*streams)
    assert torch.equal(*square_sums)
    check_rows(rounded, plain.values)


MODELS = {
    "gated": SMALL,
    "biases": dataclasses.replace(SMALL, parts=("biases",)),
    "post_norms": dataclasses.replace(SMALL, parts=("post_norms", "qk_norm")),
    "odd": dataclasses.replace(SMALL, vocab_size=50, parts=("ungated",)),  # the head has no copy
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of many rows through copies, decodes beside chunks among them, and few rows after and between as packed."""
    monkeypatch.setattr(linears, "LEAST_TOKENS", 16)
    monkeypatch.setattr(fp8_copies, "LEAST_CAPABILITY", (0, 0))
    monkeypatch.setattr(tuning_table, "_LEAST_FILLED", 0.0)
    launched, copied = run_packed(monkeypatch), []
    multiply = fp8_copies.scaled_matmul

    def noted(x: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, *others: Any) -> None:
        if len(weights) != spec.vocab_size:  # the head takes as many rows as logits are asked for
            copied.append(len(x))
        multiply(x, scales, weights, *others)

    monkeypatch.setattr(fp8_copies, "scaled_matmul", noted)
    spec, checkpoint = random_model(MODELS[name])
    runner = GPURunner(spec, checkpoint, CONFIG)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"), 1 << 30)
    without = resolved(spec, checkpoint, dataclasses.replace(CONFIG, fp8_copies=False), "cuda")
    plain_bytes = plan_memory(spec, checkpoint, without, 1 << 30)
    assert plan.copy_bytes == runner.backend.model.copy_bytes > plain_bytes.copy_bytes == 0
    assert runner.capacity.weight_bytes == plan.weight_bytes + plan.copy_bytes
    layers = len(spec.layers)
    first = runner.request(0, random_tokens(MODELS[name], 40, 1))
    second = runner.request(1, random_tokens(MODELS[name], 23, 2), first=2)
    for parts, padded in (((first, 17),), 32), (((first, 1), (second, 17)), 32), (((first, 9), (second, 1)), 16):
        copied.clear()
        runner.step(parts)
        assert copied == [padded] * 4 * layers
    copied.clear()
    launched.norms.clear()
    runner.step([(first, 1), (second, 1)])
    assert not copied
    assert launched.norms
    reference, exact = FP8Reference(spec, checkpoint), ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    for request, parts in ((first, (17, 1, 9, 1)), (second, (17, 1, 1))):
        hidden, expected, at = reference.hidden(request.token_ids[: request.computed]), [], 0
        for count in parts:
            reference.rounded_head = spec.vocab_size % 16 == 0 and count > 8
            expected.append(reference.head(hidden[at : at + count]))
            at += count
        errors = row_errors(request.values(), np.concatenate(expected))
        assert errors[:-1].min() <= 0.002  # where no rounding went the other way, nothing differs
        assert errors[:-1].mean() <= 0.04
        assert errors[:-1].max() <= 0.12
        assert errors[-1] <= 0.2  # of matrices as packed, over a cache of copies
        assert row_errors(request.values(), exact.logits(request.token_ids[: request.computed])).mean() > 0.02
    runner.close()


def test_sums_in_what_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    device, partials = interpreter_device(), torch._scaled_mm
    assert sum_type(device) == torch.float32
    refused = [torch.float32]

    def refusing(*operands: Any, out_dtype: Any, **options: Any) -> Any:
        if out_dtype in refused:
            raise RuntimeError("only bf16 is supported\nmore")
        return partials(*operands, out_dtype=out_dtype, **options)

    monkeypatch.setattr(torch, "_scaled_mm", refusing)
    assert sum_type(device) == torch.bfloat16
    refused.append(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"does not run on interpreter: only bf16 is supported$"):
        sum_type(device)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, out_dtype, out=None, **__: out)  # writes nothing
    with pytest.raises((UnsupportedModelError, TypeError)):
        sum_type(device)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="can't be combined"):
        EngineConfig(fp8_copies=True, batch_invariant=True)
    spec, checkpoint = random_model(SMALL)
    with pytest.raises(InvalidRequestError, match=r"needs a GPU of compute capability 8\.9"):
        CPUBackend().load(spec, checkpoint, resolved(spec, checkpoint, CONFIG))
    with pytest.raises(InvalidRequestError, match=r"8\.9 or more; interpreter has 0\.0"):
        GPURunner(spec, checkpoint, CONFIG)
    gpu = torch.device("cuda")
    with pytest.raises(InvalidRequestError, match=r"A100 has 8\.0"):
        check_device(DeviceProfile(gpu, "A100", (8, 0), 1, 1))
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_device(DeviceProfile(gpu, "", capability, 1, 1))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(InvalidRequestError, match="NVIDIA"):
        check_device(DeviceProfile(gpu, "MI300", (9, 4), 1, 1))


def test_commands(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(smollm2_path)
    plan = ["plan", model, "--memory", "4G", "--fp8-copies", "--device"]
    assert run_app(app, [*plan, "cuda"]) == 0
    weights = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("weights"))
    assert " in FP8, and the embedding" in weights
    for command in ([*plan, "cpu"], ["run", model, "hi", "--fp8-copies"], ["bench", model, "--fp8-copies"]):
        assert run_app(app, [*command, *([] if command[0] == "plan" else ["--device", "cpu"])]) != 0
        assert "fp8_copies needs a GPU" in capsys.readouterr().err
    assert run_app(app, ["run", model, "hi", "--fp8-copies", "--batch-invariant"]) != 0
    assert "can't be combined" in capsys.readouterr().err
    for command in ("run", "bench", "serve"):
        assert run_app(app, [command, "--help"]) == 0
        assert re.search(r"3\.7\W+%\W+error", capsys.readouterr().out)
