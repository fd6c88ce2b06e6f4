"""Memory that runs out and a context that is lost, at load, in a step and at the end: with made-up errors."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from triton.runtime.errors import OutOfResources  # noqa: E402

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from number_text import NumberText  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.base import ForwardInput  # noqa: E402
from realizar.backends.cuda import load as load_module  # noqa: E402
from realizar.backends.cuda.device import interpreter_device  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.cuda.sampling.host_step_sampler import FinishedStep  # noqa: E402
from realizar.backends.cuda.sampling.results import PendingResult  # noqa: E402
from realizar.backends.cuda.weights import load as weights_module  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import CapacityError, DeviceLostError, EngineDeadError, KernelError  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from resolving import (  # noqa: E402
    EngineClient,
    new_core,
    resolved,
)
from step_inputs import (  # noqa: E402
    opened_row,
    results_of,
    scheduled_row,
    step_input,
    stepped,
)

RECIPE = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="Q8_0", windows=(None,))
CONFIG = EngineConfig(max_running=2, max_step_tokens=16, context_length=64, kv_cache_dtype="f16")
GREEDY = SamplingParams(temperature=0)
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")


def test_a_load_that_runs_out_of_memory_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is free without the garbage collector, so that the next, smaller load finds it."""
    kept: list[weakref.ref[Any]] = []

    def no_memory(*_arguments: object) -> None:
        raise torch.OutOfMemoryError(str(OUT_OF_MEMORY))

    class Weights(load_module.Weights):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(load_module, "KVMemory", no_memory)
    monkeypatch.setattr(load_module, "Weights", Weights)
    spec, checkpoint = random_model(RECIPE)
    backend = CUDABackend(device=interpreter_device())
    gc.collect()
    gc.disable()
    try:
        try:
            backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
        except CapacityError as error:
            assert str(error) == "the GPU is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."  # noqa: PT017
            backend.shutdown()
        assert [each() for each in kept] == [None]
    finally:
        gc.enable()
    monkeypatch.undo()
    backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
    backend.shutdown()
    backend.shutdown()


def test_an_upload_that_fails_names_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix alone, two that are one matmul, the embedding, a norm."""
    spec, checkpoint = random_model(RECIPE)
    layer = spec.layers[0]
    gate, up, down = (each.weight for each in (layer.feed_forward.gate, layer.feed_forward.up, layer.feed_forward.down))  # type: ignore[union-attr]
    pack = weights_module.Weights._pack_plain

    def expect(failing: str, named: str) -> None:
        wanted = checkpoint.tensors[spec.tensors[failing].name].data

        def fails(self: Any, source: Any, *arguments: Any) -> Any:
            if np.shares_memory(source.raw, wanted):
                raise OUT_OF_MEMORY
            return pack(self, source, *arguments)

        monkeypatch.setattr(weights_module.Weights, "_pack_plain", fails)
        backend = CUDABackend(device=interpreter_device())
        with pytest.raises(CapacityError, match=f"^{named}: the GPU is out of memory: CUDA out of memory"):
            backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
        backend.shutdown()

    expect(down, f"tensor {down}")
    expect(up, f"tensors {gate}, {up}")
    expect(spec.embedding, f"tensor {spec.embedding}")
    monkeypatch.undo()

    def no_vector(*_arguments: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(weights_module.Weights, "_send", no_vector)
    backend = CUDABackend(device=interpreter_device())
    with pytest.raises(CapacityError, match=f"^tensor {spec.final_norm.weight}: the GPU is out of memory"):
        backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
    backend.shutdown()


@pytest.fixture(scope="module")
def runner() -> Iterator[GPURunner]:
    made = GPURunner(*random_model(RECIPE), CONFIG)
    yield made
    made.close()


def step_of(row: int, ids: list[int]) -> ForwardInput:
    places = np.arange(len(ids), dtype=np.int32)
    return step_input([scheduled_row(row, ids, sample=True)], (places,), (np.zeros((1, 1), np.int32),))


def test_a_step_that_could_not_be_sampled_does_not_stop_the_next(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in sampling, when the step starts or, with a grammar, when its result is asked for."""
    backend, ids = runner.backend, [3, 4, 5]

    def no_memory(_step: object) -> None:
        raise OUT_OF_MEMORY

    backend.open(opened_row(0, GREEDY, ids))
    backend.open(opened_row(1, replace(GREEDY, structured=StructuredOutput("regex", "a")), ids))
    with monkeypatch.context() as patched:
        patched.setattr(backend.model.finisher, "finish", no_memory)
        with pytest.raises(CapacityError, match="Tried to allocate"):
            backend.submit(step_of(0, ids))
        lost = backend.submit(step_of(1, ids))
        with pytest.raises(CapacityError, match="Tried to allocate"):
            lost.result()
    with pytest.raises(CapacityError, match="could not be sampled"):
        lost.result()
    backend.close(0)
    backend.close(1)
    backend.open(opened_row(1, GREEDY, ids))
    assert len(results_of(backend.submit(step_of(1, ids)).result())[0].token_ids) == 1
    backend.close(1)


def test_the_engine_goes_on_after_memory_ran_out(runner: GPURunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of two steps in flight fails, smaller steps replace it; if all fail, the request has an error."""
    core = new_core(runner.backend, runner.spec, CONFIG, steps_in_flight=2)
    run, calls, failing = runner.backend.model.graphs.run, 0, {2}

    def tight(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise OUT_OF_MEMORY
        run(*arguments)

    def answer(name: str) -> tuple[list[int], list[str | None]]:
        core.add(Request(name, (7, 8, 9), GREEDY, 4))
        outputs = []
        while core.has_work:
            outputs += stepped(core)
            core.audit()
        errors = [output.error.message if output.error else None for output in outputs]
        return [token_id for output in outputs for token_id in output.token_ids], errors

    expected, _ = answer("before")
    monkeypatch.setattr(runner.backend.model.graphs, "run", tight)
    assert answer("again") == (expected, [None] * 4)
    failing = set(range(1000))
    _, errors = answer("fails")
    assert errors[-1] == "the GPU is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    failing = set()
    assert answer("after") == (expected, [None] * 4)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KernelError("launching attend: CUDA_ERROR_INVALID_VALUE"), "launching attend: CUDA_ERROR_INVALID_VALUE"),
        (OutOfResources(300_000, 232_448, "shared memory"), "a Triton kernel does not compile for this GPU: .*300000"),
        (ZeroDivisionError("of nothing"), "a launch raised ZeroDivisionError: of nothing"),
    ],
    ids=["the driver", "Triton", "another"],
)
@pytest.mark.parametrize("place", ["submit", pytest.param("result", marks=pytest.mark.full)])
def test_a_launch_that_fails_costs_its_step_alone(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str, place: str
) -> None:
    """Of the model's kernels when it is submitted, or of the sampler's when its result is asked for."""
    core = new_core(runner.backend, runner.spec, CONFIG, steps_in_flight=2)

    def fails(*_arguments: object) -> None:
        raise error

    def answer(name: str) -> tuple[list[int], str | None]:
        core.add(Request(name, (7, 8, 9), GREEDY, 4))
        outputs = []
        while core.has_work:
            outputs += stepped(core)
            core.audit()
        last = outputs[-1].error
        return [token_id for output in outputs for token_id in output.token_ids], last and last.message

    before = answer("before")
    assert before[1] is None
    with monkeypatch.context() as patched:
        if place == "submit":
            patched.setattr(runner.backend.model.graphs, "run", fails)
        else:
            for results in (FinishedStep, PendingResult):
                patched.setattr(results, "read", fails)
        _, message = answer("fails")
        assert re.match(says, str(message))
    assert answer("after") == before


def test_a_lost_context_ends_the_engine_and_its_end_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process then ends by itself, which alone frees the device."""
    spec, checkpoint = random_model(RECIPE)
    backend = CUDABackend(device=interpreter_device())
    backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
    core = new_core(backend, spec, CONFIG, steps_in_flight=2, device=ChosenDevice("cuda"))

    def lost(*_arguments: object) -> None:
        raise LOST

    monkeypatch.setattr(backend.model.graphs, "run", lost)
    monkeypatch.setattr(backend, "_free", lost)
    client = EngineClient(core, NumberText, ())
    stream = client.submit([7, 8, 9], GREEDY)
    says = "DeviceLostError: the GPU's context is lost: CUDA error: an illegal.*make a new LLM in a new process"
    with pytest.raises(EngineDeadError, match=says):
        stream.result()
    with pytest.raises(EngineDeadError, match=says):
        client.submit([7], GREEDY)
    client.close()
    assert "is freed only when the process ends" in caplog.records[-1].message


@pytest.mark.parametrize(("error", "ours"), [(OUT_OF_MEMORY, CapacityError), (LOST, DeviceLostError)])
def test_tables_of_a_row_may_not_fit(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch, error: Exception, ours: type[Exception]
) -> None:
    def fails(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(runner.backend.model.sampler, "open", fails)
    with pytest.raises(ours, match="the GPU"):
        runner.backend.open(opened_row(0, GREEDY, [1]))
