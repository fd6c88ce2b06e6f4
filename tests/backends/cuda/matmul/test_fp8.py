"""Prompts in 8-bit floats without a GPU: their order in memory, whole models over twins of matmuls, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backend_runs import Request  # noqa: E402
from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.fp8_cases import (  # noqa: E402
    BLOCK,
    FP8Reference,
    FP8Values,
    awkward_rows,
    check_tokens,
    converted,
    e4m3_source,
    poisoned,
    row_errors,
)
from backends.cuda.matmul.packed_experts import run_packed_experts  # noqa: E402
from backends.cuda.matmul.packed_matmuls import run_packed  # noqa: E402
from quantization.stored_checkpoints import Stored, write_model  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.kernels.activate import activate  # noqa: E402
from realizar.backends.cuda.kernels.normalize import normalize  # noqa: E402
from realizar.backends.cuda.matmul import fp8, tuning_table  # noqa: E402
from realizar.backends.cuda.matmul.fp8 import FP8_ROWS, decoded_bytes, runs_fp8, stored_weights  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, InputFormat  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import pack_by_threads  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.backends.resolved_config import resolve_config  # noqa: E402
from realizar.checkpoint.checkpoint import Checkpoint  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.cli.main import app, run_app  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import InvalidRequestError  # noqa: E402
from realizar.models.registry import build_spec  # noqa: E402
from realizar.models.spec import ModelSpec  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from resolving import resolved  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
CPU = torch.device("cpu")
SMALL = Recipe(32, 2, 1, 64, 128, 48, windows=(9,), weights="Q8_0")
CONFIG = EngineConfig(
    threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16",
    prompt_dtype="fp8",
)  # fmt: skip


def test_every_element_has_its_place() -> None:
    """As `layouts.activations` describes it."""
    x = torch.randn((300, 200), generator=torch.Generator().manual_seed(1))
    values, buffer = FP8Values.of(x), converted(x)
    seen = torch.zeros(buffer.codes.shape, dtype=torch.bool)
    for m in (0, 7, 8, 120, 127, 128, 255, 256, 299):
        for c in range(200):
            d = c % 64
            at = m // BLOCK, c // 64, d // 16, m % BLOCK // 8, m % 8, d % 16
            assert int(buffer.codes[at]) == int(values.codes[m, c // 128, c % 128].view(torch.uint8))
            assert not seen[at]
            seen[at] = True
        for group in range(2):
            place = m % BLOCK // 16 * 16 + m % 8 // 2 * 4 + m % 16 // 8 * 2 + m % 2
            assert float(buffer.terms[m // BLOCK, group, place]) == pytest.approx(float(values.scales[m, group]))


def test_rows_that_are_laid_in_tiles_lie_row_by_row() -> None:
    """In the order that blocks of tokens have, zeros beyond the columns' chunk."""
    x = torch.randn((9, 200), generator=torch.Generator().manual_seed(1))
    found, wanted = converted(x, FP8_ROWS), FP8Values.of(x).buffer(FP8_ROWS)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.allclose(found.terms, wanted.terms, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("cols", [64, 700])
def test_tokens_as_torch_rounds_them(cols: int) -> None:
    x = awkward_rows(cols, CPU)
    check_tokens(converted(x), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_activations(interleaved: bool) -> None:
    """Activations in FP8 equal the float32 ones rounded."""
    rows, width, none = 3, 192, torch.zeros(4, dtype=torch.int32)
    partials = torch.randn((2, rows, 2 * width), generator=torch.Generator().manual_seed(4))
    plain, rounded = ActivationBuffers(rows, CPU).get(InputFormat("f32"), width), poisoned(rows, width, CPU)
    for buffer in (plain, rounded):
        activate[(rows, 1)](
            partials, partials.stride(0), partials.stride(1), none, 64 if interleaved else width, width,
            *buffer.pointers(), none, none, SPLITS=2, BIAS=False, KIND=0, GATED=True, INTERLEAVED=interleaved,
            DEPENDENT=False, BLOCK=256, **buffer.constants(),
        )  # fmt: skip
    check_tokens(rounded, plain.values)


def test_norms() -> None:
    """Norms in FP8 equal the float32 ones rounded; the stream goes on in float32."""
    rows, cols, none = 3, 96, torch.zeros(1)
    partials, stream = (torch.randn((1, rows, cols), generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    weight = 1 + 0.1 * torch.arange(cols, dtype=torch.float32)
    plain, rounded = ActivationBuffers(rows, CPU).get(InputFormat("f32"), cols), poisoned(rows, cols, CPU)
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
    check_tokens(rounded, plain.values)


@pytest.mark.parametrize("share", ["block", "tensor", "feature", "own"])
@pytest.mark.parametrize(("out_features", "cols"), [(296, 640), (192, 704), (48, 64), (130, 96)])
def test_numbers_of_eight_bits_lie_where_the_copy_engine_finds_them(
    share: str, out_features: int, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In boxes of rows, with scales of 64 output features and 128 columns, and factors where each feature has one."""
    monkeypatch.setattr(fp8, "TensorMap", Boxes)
    source = e4m3_source(share, out_features, cols, np.random.default_rng(1))
    matrix = pack_by_threads([source], "cpu")
    found = stored_weights(matrix)
    if share == "own" and cols > 128:
        assert found is None
        assert decoded_bytes([matrix]) > 0
        return
    assert found is not None
    assert found is stored_weights(matrix)
    assert decoded_bytes([matrix]) == 0
    assert (found.features is None) == (share in ("block", "tensor"))
    boxes = cast("Boxes", found.boxes)
    rows = matrix.weights.as_strided(boxes.sizes, boxes.strides).permute(2, 1, 4, 0, 3).squeeze(-1)
    values = rows.flatten(2).flatten(0, 1)[:out_features, :cols].view(torch.float8_e4m3fn).float()
    scales = found.scales[0].permute(0, 2, 1).flatten(0, 1).repeat_interleave(64, 0).repeat_interleave(128, 1)
    weights = values * scales[:out_features, :cols]
    if found.features is not None:
        weights *= found.features[0, :out_features, None]
    assert torch.equal(weights, torch.from_numpy(source.dequantize()))


class Boxes:
    """A stand-in for `TensorMap` that keeps what it was made of."""

    def __init__(
        self, address: int, element: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> None:
        assert (element, tuple(box)) == ("u8", (64, 64, 4, 1, 1))
        self.address, self.sizes, self.strides = address, tuple(sizes), (1, *strides)

    def getPtr(self) -> int:
        return self.address


MODELS = {
    "gated": SMALL,
    "biases": dataclasses.replace(SMALL, parts=("biases",)),
    "post_norms": dataclasses.replace(SMALL, parts=("post_norms", "qk_norm")),
    "ungated": dataclasses.replace(SMALL, parts=("ungated",)),
    "mixture": dataclasses.replace(SMALL, experts=3, per_token=3),  # all experts, so that none flips
    "mixture, shared": dataclasses.replace(SMALL, experts=3, per_token=3, parts=("shared", "shared_gate")),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps in FP8, decodes beside chunks among them, and short steps after and between as without."""
    monkeypatch.setattr(fp8, "LEAST_TOKENS", 32)
    monkeypatch.setattr(fp8, "DECODED_PAIRS", 32)
    monkeypatch.setattr(fp8, "runs_fp8", lambda _: True)
    monkeypatch.setattr(tuning_table, "_LEAST_FILLED", 0.0)
    launched, experts = run_packed(monkeypatch), run_packed_experts(monkeypatch)
    spec, checkpoint = random_model(MODELS[name])
    runner = GPURunner(spec, checkpoint, CONFIG)
    first = runner.request(0, random_tokens(MODELS[name], 40, 1))
    second = runner.request(1, random_tokens(MODELS[name], 23, 2), first=2)

    def in_fp8() -> int:
        return sum(count for kernel, count in launched.names.items() if kernel.startswith("wgmma_fp8"))

    for parts, is_long in (
        (((first, 17),), True),
        (((first, 1), (second, 17)), True),
        (((first, 9), (second, 1)), False),
    ):
        before = in_fp8()
        runner.step(parts)
        dense = 2 if spec.mixtures() else 4
        assert in_fp8() - before == (dense * len(spec.layers) if is_long else 0)
    before = in_fp8()
    runner.step([(first, 1), (second, 1)])
    assert in_fp8() == before
    assert experts["grouped in 8-bit floats"] == (2 * len(spec.mixtures()))
    gated = any(kernel.startswith("wgmma_fp8") and "_silu_" in kernel for kernel in launched.names)
    assert gated == (name in ("gated", "post_norms"))
    check_long(spec, checkpoint, ((first, 18), (second, 17)))
    runner.close()


@pytest.mark.parametrize(
    ("stored", "mixture"), [(Stored("fp8"), False), (Stored("float", group=0, rows=1), False), (Stored("fp8"), True)],
    ids=str,
)  # fmt: skip
def test_checkpoints_in_fp8(stored: Stored, mixture: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers are multiplied as they are: nothing is decoded, and so experts need fewer pairs."""
    monkeypatch.setattr(fp8, "STORED_TOKENS", 32)
    monkeypatch.setattr(fp8, "STORED_PAIRS", 16)
    monkeypatch.setattr(fp8, "runs_fp8", lambda _: True)
    monkeypatch.setattr(fp8, "TensorMap", Boxes)
    launched, experts = run_packed(monkeypatch), run_packed_experts(monkeypatch)
    write_model(tmp_path, stored, mixture=mixture)
    checkpoint = open_checkpoint(tmp_path)
    spec = build_spec(checkpoint)
    runner = GPURunner(spec, checkpoint, CONFIG)
    request = runner.request(0, list(range(40)))
    runner.step([(request, 32)])
    kernels = [name for name in launched.names if "fp8" in name]
    assert kernels
    assert all(name.startswith("wgmma_fp8_stored") for name in kernels)
    assert experts["grouped in 8-bit floats"] == len(spec.mixtures())
    if not mixture:  # whose choices differ where two scores are as near as activations are rounded
        check_long(spec, checkpoint, ((request, 32),))
    runner.close()


def check_long(spec: ModelSpec, checkpoint: Checkpoint, requests: Iterable[tuple[Request, int]]) -> None:
    """The first logits of requests, of steps in FP8, are those of rounded activations."""
    reference, exact = FP8Reference(spec, checkpoint), ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    for request, long in requests:
        tokens = request.token_ids[: request.computed]
        errors = row_errors(request.values()[:long], reference.logits(tokens)[:long])
        assert np.median(errors) <= 0.01  # where no rounding went the other way, nothing differs
        assert errors.max() <= 0.12
        assert row_errors(request.values()[:long], exact.logits(tokens)[:long]).mean() > 0.01


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="can't be combined"):
        EngineConfig(prompt_dtype="fp8", batch_invariant=True)
    with pytest.raises(InvalidRequestError, match="prompt_dtype must be one of auto, f16, fp8, not int4"):
        EngineConfig(prompt_dtype="int4")  # type: ignore[arg-type]
    spec, checkpoint = random_model(SMALL)
    with pytest.raises(InvalidRequestError, match=r"needs an NVIDIA GPU of compute capability 9\.0, not the CPU"):
        resolved(spec, checkpoint, CONFIG)
    for name, capability in (("A100", (8, 0)), ("L40", (8, 9)), ("B200", (10, 0))):
        with pytest.raises(InvalidRequestError, match=rf"9\.0, and {name} has {capability[0]}\.{capability[1]}"):
            resolve_config(spec, CONFIG, ChosenDevice("cuda", 0, name, capability), float32_weights=False)
    gpu = torch.device("cuda")
    assert runs_fp8(DeviceProfile(gpu, "", (9, 0), 1, 1))
    assert not runs_fp8(DeviceProfile(gpu, "H100", (9, 0), 1, 1, without=frozenset({"wgmma"})))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not runs_fp8(DeviceProfile(gpu, "MI250", (9, 0), 1, 1))


_ON_CPU = ["--prompt-dtype", "fp8", "--device", "cpu"]


def test_commands(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(smollm2_path)
    plan = ["plan", model, "--memory", "4G", "--prompt-dtype", "fp8", "--device"]
    assert run_app(app, [*plan, "cuda"]) == 0
    for command in ([*plan, "cpu"], ["run", model, "hi", *_ON_CPU], ["bench", model, *_ON_CPU]):
        assert run_app(app, command) != 0
        assert "prompt_dtype fp8 needs an NVIDIA GPU" in capsys.readouterr().err
    assert run_app(app, ["run", model, "hi", "--prompt-dtype", "fp8", "--batch-invariant"]) != 0
    assert "can't be combined" in capsys.readouterr().err
    for command in ("run", "bench", "serve"):
        assert run_app(app, [command, "--help"]) == 0
        assert "--prompt-dtype" in capsys.readouterr().out
