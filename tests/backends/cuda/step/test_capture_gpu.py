"""Captures that really fail on a card: one size goes without its graph, and everything else is as it was."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import httpx  # noqa: E402

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda import bind  # noqa: E402
from realizar.backends.cuda.launch import Launch, StepKind  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from resolving import new_core  # noqa: E402
from step_inputs import stepped  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402
from waits import HANG_S  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPE = Recipe(64, 4, 1, hidden_size=256, feed_forward_size=512, weights="Q4_K", vocab_size=512)
CONFIG = EngineConfig(max_running=4, max_step_tokens=64, context_length=256, kv_cache_bytes=8 << 20)
DECODES, CHUNKS = StepKind(2, 2, 0), 32
_OTHER = []


def fetch() -> None:
    torch.ones(1, device="cuda").item()


def take_pageable() -> None:
    torch.ones(1 << 20, device="cuda").cpu()


def use_the_legacy_stream() -> None:
    with torch.cuda.stream(torch.cuda.default_stream()):
        torch.ones(4, device="cuda").add_(1)
    torch.cuda.default_stream().synchronize()


def wait_through_the_driver() -> None:
    """The status of a launch is not read: the failure shows only at the end of the capture."""
    from cuda.bindings import driver

    driver.cuStreamSynchronize(torch.cuda.current_stream().cuda_stream)


def raise_something() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ZeroDivisionError("not the device's")


def run_out_of_memory() -> None:
    if torch.cuda.is_current_stream_capturing():
        _OTHER.append(torch.empty(1 << 42, device="cuda"))


SPOILERS: dict[str, Callable[[], None]] = {
    "synchronise": torch.cuda.synchronize,
    "fetch a value": fetch,
    "copy to pageable memory": take_pageable,
    "another stream": use_the_legacy_stream,
    "wait through the driver": wait_through_the_driver,
    "raise": raise_something,
    "out of memory": run_out_of_memory,
}


def spoil(monkeypatch: pytest.MonkeyPatch, kinds: Callable[[StepKind], bool], spoiler: Callable[[], None]) -> None:
    """Add a launch that can't be captured to the body of steps of some shapes."""
    body = bind.Binder.bind_body

    def run(kind: StepKind) -> None:
        if kinds(kind):
            spoiler()

    def bind_body(*arguments: object) -> list[Launch]:
        launches = body(*arguments)  # type: ignore[arg-type]
        return [*launches[:3], Launch("spoiler", run), *launches[3:]]

    monkeypatch.setattr(bind.Binder, "bind_body", bind_body)


def answers(core: EngineCore, count: int) -> list[list[int]]:
    """Tokens of so many greedy requests that run together."""
    for index in range(count):
        core.add(Request(f"{count}-{index}", (7 + index, 8, 9), SamplingParams(temperature=0), 12))
    found: dict[str, list[int]] = {f"{count}-{index}": [] for index in range(count)}
    while core.has_work:
        for output in stepped(core):
            assert output.error is None
            found[output.request_id] += output.token_ids
        core.audit()
    return list(found.values())


@pytest.fixture
def expected() -> Iterator[list[list[list[int]]]]:
    runner = GPURunner(*random_model(RECIPE), CONFIG)
    core = new_core(runner.backend, runner.spec, CONFIG, steps_in_flight=2)
    yield [answers(core, count) for count in (1, 2, 3, 4)]
    core.close()


@pytest.mark.parametrize("name", SPOILERS)
def test_a_capture_that_fails_costs_its_sizes_alone(
    name: str, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names them; every other size has its graph, and all answers are as they would have been."""
    spoil(monkeypatch, lambda kind: kind == DECODES or (kind.tokens == CHUNKS and kind.tiles > 0), SPOILERS[name])
    spec, checkpoint = random_model(RECIPE)
    before = torch.cuda.memory_allocated()
    runner = GPURunner(spec, checkpoint, CONFIG)
    graphs = runner.backend.model.graphs._graphs
    assert DECODES not in graphs
    assert {StepKind(rows, rows, 0) for rows in (1, 4)} <= graphs.keys()
    assert {kind.tokens for kind in graphs if kind.tiles} == {4, 8, 16, 64}
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("steps of 2 decodes; steps of 32 tokens in chunks")
    assert "\n" not in warning
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    core = new_core(runner.backend, spec, CONFIG, steps_in_flight=2)
    assert [answers(core, count) for count in (1, 2, 3, 4)] == expected
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    ids = random_tokens(RECIPE, 40, 1)
    exact = reference.logits(ids)
    error = np.linalg.norm(runner.logits(ids, (32, 1)) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error.max() <= 0.03
    core.close()
    del core, runner, graphs
    assert torch.cuda.memory_allocated() <= before


def test_loads_of_float_models_keep_no_more_and_more_for_cublas() -> None:
    """It has a workspace for each stream: captures share one."""
    held = []
    for _ in range(4):
        spec, checkpoint = random_model(Recipe(64, 4, 1, weights="BF16", vocab_size=512))
        GPURunner(spec, checkpoint, CONFIG).close()
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 3


def test_without_graphs(expected: list[list[list[int]]]) -> None:
    config = EngineConfig(
        max_running=4, max_step_tokens=64, context_length=256, kv_cache_bytes=8 << 20, graphs=False
    )  # fmt: skip
    runner = GPURunner(*random_model(RECIPE), config)
    assert not runner.backend.model.graphs._graphs
    core = new_core(runner.backend, runner.spec, config, steps_in_flight=2)
    assert [answers(core, count) for count in (1, 2, 3, 4)] == expected
    core.close()


SPOILED = """
import sys
if sys.orig_argv[1:3] == ["-m", "realizar.engine.process.main"]:
    import torch
    from realizar.backends.cuda import bind
    from realizar.backends.cuda.launch import Launch
    body = bind.Binder.bind_body
    run = lambda shape: torch.cuda.synchronize() if shape.tokens == 2 and not shape.tiles else None
    bind.Binder.bind_body = lambda *arguments: [*body(*arguments), Launch("spoiler", run)]
"""
ASKED = {"model": "tiny", "prompt": "Once", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("options", [(), ("--no-graphs",)], ids=["a capture fails", "no graphs"])
def test_the_server_serves(options: tuple[str, ...], tmp_path: Path) -> None:
    """A launch of two rows synchronises: `serve` becomes ready and answers one, two and four requests at once."""
    model = tmp_path / "tiny.gguf"
    write_tiny_model(model)
    (tmp_path / "sitecustomize.py").write_text(SPOILED)
    paths = [str(tmp_path), *(path for path in sys.path if path)]
    command = [
        sys.executable,
        "-m",
        "realizar",
        "serve",
        str(model),
        "--device",
        "cuda",
        "--port",
        "0",
        "--max-running",
        "4",
    ]
    process = subprocess.Popen(
        [*command, "--kv-cache-bytes", "64M", *options], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready: "):
                break
        assert lines[-1].startswith("ready: "), "".join(lines)
        url = lines[-1].split()[1]
        with httpx.Client(timeout=HANG_S) as client:
            for count in (1, 2, 4):
                answer = client.post(f"{url}/v1/completions", json={**ASKED, "n": count}).json()
                assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * count
                assert len({choice["text"] for choice in answer["choices"]}) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_S)
        process.stderr.close()
    warned = [line for line in lines if "without a graph" in line]
    assert len(warned) == (0 if options else 1)
    assert all(re.search(r"steps of 2 decodes run without a graph", line) for line in warned)
    assert process.returncode == 0
