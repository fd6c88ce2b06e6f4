"""The parts of a CUDA engine for quantised models, and where each lives here: a row for each part, with its check.

Each row is one line of the design's table whose right side is the GPU backend; its id says what it holds. The checks
are short, and the parts' own tests go into the corners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.sampling.sampled_steps import SampledSteps  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile, interpreter_device, open_device  # noqa: E402
from realizar.backends.cuda.device_errors import device_errors  # noqa: E402
from realizar.backends.cuda.graphs import GraphRunner  # noqa: E402
from realizar.backends.cuda.inspection.launch_times import time_launches  # noqa: E402
from realizar.backends.cuda.kernel_sizes import decode_parts, fixed_parts, part_keys  # noqa: E402
from realizar.backends.cuda.launch import Launch, StepKind  # noqa: E402
from realizar.backends.cuda.layouts.fragments import fragment_format  # noqa: E402
from realizar.backends.cuda.matmul.fp8 import least_tokens  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, InputFormat  # noqa: E402
from realizar.backends.cuda.matmul.linears import MergedLinear  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulKernels  # noqa: E402
from realizar.backends.cuda.matmul.tuning_table import load_tuning  # noqa: E402
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, WgmmaTiles  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.cuda.weights.experts import matrix_bytes  # noqa: E402
from realizar.backends.cuda.weights.pack import PackedMatrix  # noqa: E402
from realizar.backends.cuda.weights.plain import pack_plain  # noqa: E402
from realizar.bench.profile import StepWork, one_step, open_rows  # noqa: E402
from realizar.checkpoint.checkpoint import Checkpoint  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import CheckpointError, DeviceLostError  # noqa: E402
from realizar.quantization.block_source import block_source  # noqa: E402
from realizar.quantization.ggml_layouts import GGML_LAYOUTS, Q4_K  # noqa: E402
from realizar.quantization.random_blocks import random_blocks  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from resolving import resolved  # noqa: E402
from step_inputs import rows_of  # noqa: E402

CPU = torch.device("cpu")
DEVICE = open_device() if torch.cuda.is_available() else interpreter_device()
RECIPE = Recipe(
    32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="Q8_0", windows=(None,),
    parts=("biases", "qk_norm", "interleaved", "layer_norm", "ungated"), activation="gelu",
)  # fmt: skip
CONFIG = EngineConfig(max_running=2, max_step_tokens=16, context_length=64, kv_cache_dtype="int8")


@pytest.fixture(scope="module")
def runner() -> Iterator[GPURunner]:
    made = GPURunner(*random_model(RECIPE), CONFIG)
    yield made
    made.close()


def a_lost_context_differs_from_a_lack_of_memory(_runner: GPURunner) -> None:
    with pytest.raises(DeviceLostError), device_errors():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def all_is_run_before_it_is_captured(_runner: GPURunner) -> None:
    """Every size runs before its capture, and a size whose capture fails goes on without a graph."""
    happened: list[str] = []

    arrays = SimpleNamespace(clear=lambda: happened.append("clear"))
    device = DeviceProfile(torch.device("cuda", 0), "none", (9, 0), 1, 1)
    launch = Launch("norm", lambda kind: happened.append(f"run {kind.tokens}"))
    graphs = GraphRunner([launch], [], SimpleNamespace(arrays=arrays), device)  # type: ignore[arg-type]

    def capture(run: Any) -> Any:
        happened.append(f"capture {run.args[0].tokens}")
        raise ValueError("no capture here")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "synchronize", lambda _device: happened.append("wait"))
        patched.setattr("realizar.backends.cuda.graphs.GraphRecorder", lambda *_: SimpleNamespace(record=capture))
        graphs.prepare([StepKind(1, 1, 0), StepKind(2, 2, 0)], lambda _share: None)
    assert happened == ["clear", "run 2", "wait", "capture 2", "run 1", "wait", "capture 1"]
    assert not graphs.replay(StepKind(1, 1, 0))


def weights_are_packed_once_with_totals_and_errors_by_name(runner: GPURunner) -> None:
    matrices = [matrix for group in runner.backend.model.weights.groups.values() for matrix in group]
    assert runner.capacity.weight_bytes == sum(map(matrix_bytes, matrices)) > 0
    spec, checkpoint = random_model(RECIPE)
    name, *_ = (name for name in checkpoint.tensors if "down" in name)
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key != name}
    lacking = Checkpoint(checkpoint.path, checkpoint.format, checkpoint.metadata, tensors)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        CUDABackend(device=DEVICE).load(spec, lacking, resolved(spec, None, CONFIG, "cuda"))


def one_matmul_takes_all_types_side_by_side(_runner: GPURunner) -> None:
    """Rows and columns that are no power of two; activations written once for all of them."""
    types, (rows, cols), tokens = (GGMLType.Q4_0, GGMLType.Q5_1, GGMLType.Q8_0), (24, 224), 3
    rng = np.random.default_rng(4)
    data = [random_blocks(each, rows, cols, rng, 0.05) for each in types]
    sources = [block_source(each, raw, rows, cols) for each, raw in zip(types, data, strict=True)]
    matrices = [pack_plain(source, DEVICE.torch_device) for source in sources]
    linear, buffers = MergedLinear(matrices, None, DEVICE, None), ActivationBuffers(tokens, DEVICE.torch_device)
    kind = StepKind(tokens)
    (form,) = linear.input_formats(kind)
    x = buffers.get(form, cols)
    x.values.copy_(torch.from_numpy(rng.standard_normal((tokens, cols)).astype(np.float32)))
    x.scales.fill_(1.0)
    partials = torch.full((linear.splits(kind), tokens, linear.width), float("nan"), device=DEVICE.torch_device)
    linear.launch(kind, buffers.get, partials)
    weights = np.concatenate([source.dequantize() for source in sources])
    expected = x.values.double().cpu().numpy() @ weights.T.astype(np.float64)
    assert np.abs(partials.sum(dim=0).cpu().numpy() - expected).max() <= 2e-3 * np.abs(expected).max()


def contexts_are_cut_alike_for_every_batch(runner: GPURunner) -> None:
    """At fixed places where bits may not depend on the batch; else those of few rows are cut into more parts."""
    attention = runner.spec.layers[0].mixer
    card = DeviceProfile(torch.device("cuda", 0), "none", (9, 0), 132, 1)
    parts = [decode_parts(attention, rows, 4096, card) for rows in (1, 2, 8, 64, 256)]
    assert parts == sorted(parts, reverse=True)
    assert len(set(parts)) > 1
    assert [part_keys(context) for context in (100, 4096, 16384, 131072)] == [512, 512, 512, 4096]
    assert [fixed_parts(context) for context in (100, 4096, 16384, 131072)] == [1, 8, 32, 32]


def logits_of_a_model_of_many_parts(runner: GPURunner) -> None:
    """Cache in int8: chunk, then token by token, as in exact arithmetic."""
    assert runner.capacity.kv_cache_dtype == "int8"
    ids = random_tokens(RECIPE, 9, 1)
    expected = ReferenceModel(runner.spec, load_tensors(runner.spec, random_model(RECIPE)[1]), np.float64).logits(ids)
    error = np.linalg.norm(runner.logits(ids, (6, 1)) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= 0.05


def one_packed_copy_serves_every_number_of_rows(_runner: GPURunner) -> None:
    form = fragment_format(Q4_K)
    for capability, shared, tiles in (((9, 0), 227 * 1024, WgmmaTiles), ((8, 0), 163 * 1024, MmaSyncTiles)):
        tuning = load_tuning("none", capability, 108, shared)
        for rows in (1, tuning.int8_tokens):
            assert isinstance(tuning.few_tokens(rows, 4096, 4096, form).tiles, MatvecTiles)
        for rows in (8, 64, 2048):
            assert isinstance(tuning.many_tokens(rows, 4096, 4096, form).tiles, tiles)


def long_steps_are_in_fp8_where_asked_for(_runner: GPURunner) -> None:
    assert EngineConfig().prompt_dtype == "auto"
    none = torch.zeros(0)
    matrix = PackedMatrix(64, 64, fragment_format(GGML_LAYOUTS[GGMLType.Q8_0]), none, none, None)
    matmuls = cast("MatmulKernels", SimpleNamespace(activation_format=lambda *_: InputFormat("half", 64), routes={}))
    assert least_tokens([matrix]) == 1024
    for least, long in ((0, "half"), (1024, "fp8")):
        linear = MergedLinear([matrix], None, DEVICE, matmuls, fp8_tokens=least)
        kinds = [linear.input_formats(StepKind(tokens))[0].kind for tokens in (1, 1023, 1024, 4096)]
        assert kinds == ["half", "half", long, long]


def rows_are_sampled_each_by_its_own_parameters(_runner: GPURunner) -> None:
    steps, logits = SampledSteps(3, 48, on_host=not DEVICE.is_gpu), torch.arange(48.0).repeat(3, 1)
    biased = SamplingParams(temperature=0, logit_bias={5: 100.0})
    for row, sampling in enumerate((SamplingParams(temperature=0), biased, SamplingParams(top_k=1, seed=3))):
        steps.open(row, sampling, [1])
    assert [output.token_ids for output in steps.decode([0, 1, 2], [1] * 3, logits)] == [(47,), (5,), (47,)]


def every_part_of_a_layer_has_its_time(runner: GPURunner) -> None:
    step = one_step(runner.capacity, StepWork(2, 1, 10))
    open_rows(runner.backend, step)
    counts = Counter(each.part for each in time_launches(runner.backend, step, 1))
    assert {part for part, count in counts.items() if count == len(runner.spec.layers)} >= {"qkv", "attention", "down"}
    for row in rows_of(step):
        runner.backend.close(row.row)


def a_steps_graph_gives_the_bits_of_its_launches(runner: GPURunner) -> None:
    backend = runner.backend
    step = one_step(runner.capacity, StepWork(2, 1, 0))
    found = []
    for graphs in (backend.model.graphs._graphs, {}):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(backend.model.graphs, "_graphs", graphs)
            open_rows(backend, step)
            backend.submit(step).result()
            found.append(backend.model.space.logits[:2].clone())
    assert backend.model.graphs._graphs
    assert torch.equal(*found)


def no_weight_is_left_after_a_shutdown(_runner: GPURunner) -> None:
    """Three loads in a row hold no more memory than one."""
    held = []
    for _ in range(3):
        GPURunner(*random_model(RECIPE), CONFIG).close()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert len(set(held)) == 1


TABLE: dict[str, Callable[[GPURunner], None]] = {
    "device-one owner of context and streams, a poisoned context ends it": a_lost_context_differs_from_a_lack_of_memory,
    "graphs-kernels compiled and warmed before capture, fallback reported once": all_is_run_before_it_is_captured,
    "pack-weight caches, byte totals, typed errors": weights_are_packed_once_with_totals_and_errors_by_name,
    "matmuls-one family over bit width and group, any K, mixed types": one_matmul_takes_all_types_side_by_side,
    "attention-split context, fixed grid": contexts_are_cut_alike_for_every_batch,
    "kv cache in int8, rope, QK norm, GQA, biases, LayerNorm, GELU, ungated": logits_of_a_model_of_many_parts,
    "fragment order-one copy from few rows to whole prompts": one_packed_copy_serves_every_number_of_rows,
    "FP8 behind a flag": long_steps_are_in_fp8_where_asked_for,
    "sampler-argmax and logits on the device, parameters per row": rows_are_sampled_each_by_its_own_parameters,
    "profile-time per part": every_part_of_a_layer_has_its_time,
}
ON_A_GPU: dict[str, Callable[[GPURunner], None]] = {
    "graphs-decode and batched graphs": a_steps_graph_gives_the_bits_of_its_launches,
    "pack-memory pool given back": no_weight_is_left_after_a_shutdown,
}


@pytest.mark.parametrize("part", TABLE)
def test_a_part_of_the_engine(part: str, runner: GPURunner) -> None:
    TABLE[part](runner)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", ON_A_GPU)
def test_a_part_of_the_engine_on_a_gpu(part: str, runner: GPURunner) -> None:
    ON_A_GPU[part](runner)
