"""`realizar trace`: the same stages on both backends, and the one at which two runs part."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from cpu_runs import Runner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cpu.inspection import backend as on_cpu  # noqa: E402
from realizar.backends.cuda.inspection import backend as on_gpu  # noqa: E402
from realizar.backends.step_values import StageValues, describe_values, distance  # noqa: E402
from realizar.backends.weight_tensors import WeightTensors  # noqa: E402
from realizar.bench.profile import StepWork, one_step  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.cli.commands.bench import trace_lines  # noqa: E402
from realizar.cli.main import app, run_app  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import InvalidRequestError  # noqa: E402
from realizar.quantization.block_source import BlockSource  # noqa: E402
from realizar.quantization.source import MatrixSource  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

RECIPE = Recipe(32, 2, 1, 64, 96, 48, weights="Q8_0", windows=(None, None), parts=("post_norms",))
CONFIG = EngineConfig(threads=1, max_running=1, max_step_tokens=16, context_length=64, kv_cache_dtype="f16")
IDS = random_tokens(RECIPE, 6, 1)


def values_on_gpu(recipe: Recipe = RECIPE) -> list[StageValues]:
    runner = GPURunner(*random_model(recipe), CONFIG)
    step = one_step(runner.capacity, StepWork(1, 6, 0), np.array(IDS, np.int32))
    assert runner.capacity.step_sizes == (4, 8, 16), "all that a step of at most 16 tokens is padded to"
    found = on_gpu.read_values(runner.backend, runner.spec, step)
    runner.close()
    return found


@pytest.fixture(scope="module")
def values_on_cpu() -> list[StageValues]:
    return read_on_cpu(RECIPE)


def read_on_cpu(recipe: Recipe) -> list[StageValues]:
    spec, checkpoint = random_model(recipe)
    runner = Runner(spec, checkpoint, CONFIG)
    step = one_step(runner.backend.capacity(), StepWork(1, 6, 0), np.array(IDS, np.int32))
    found = on_cpu.read_values(runner.backend, spec, step)
    runner.close()
    return found


def test_both_backends_see_the_same(values_on_cpu: list[StageValues]) -> None:
    """Stage by stage, and at the end what exact arithmetic gives."""
    found = values_on_gpu()
    assert [each.stage for each in found] == [each.stage for each in values_on_cpu] == [
        "layer 0 attention input", "layer 0 feed-forward input", "layer 1 attention input",
        "layer 1 feed-forward input", "last layer output", "logits",
    ]  # fmt: skip
    assert max(distance(*pair) for pair in zip(found, values_on_cpu, strict=True)) <= 0.05
    assert len({each.norm for each in found}) == len(found)
    spec, checkpoint = random_model(RECIPE)
    logits = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(IDS)[-1:]
    assert distance(found[-1], describe_values("logits", logits.astype(np.float32))) <= 0.05
    assert trace_lines(found, values_on_cpu, 0.1)[-1] == "the two runs agree within 10%"


def test_stages_of_layers_that_lack_a_mixer_or_a_feed_forward() -> None:
    recipe = dataclasses.replace(RECIPE, lacking=("mixer", "feed_forward"))
    found, on_the_cpu = values_on_gpu(recipe), read_on_cpu(recipe)
    stages = ["layer 0 feed-forward input", "layer 1 attention input", "last layer output", "logits"]
    assert [each.stage for each in found] == [each.stage for each in on_the_cpu] == stages
    assert max(distance(*pair) for pair in zip(found, on_the_cpu, strict=True)) <= 0.05


def test_the_stage_at_which_two_runs_part(values_on_cpu: list[StageValues], monkeypatch: pytest.MonkeyPatch) -> None:
    """One has lost the output projection of the second layer."""
    spec, _ = random_model(RECIPE)
    matrix, lost = WeightTensors.matrix, spec.layers[1].mixer.o.weight

    def without(self: WeightTensors, name: str) -> MatrixSource:
        source = matrix(self, name)
        return BlockSource(GGMLType[source.layout.name], np.zeros_like(source.raw)) if name == lost else source

    monkeypatch.setattr(WeightTensors, "matrix", without)
    lines = trace_lines(values_on_gpu(), values_on_cpu, 0.1)
    assert lines[-1] == "the two runs diverge at layer 1 feed-forward input"


def test_values_that_are_not_finite() -> None:
    good = describe_values("layer 0 attention input", np.ones((3, 40), np.float32))
    values = np.ones((3, 40), np.float32)
    values[0, 3], values[2, 5], values[2, 6] = np.nan, np.inf, -2.5
    bad = describe_values("layer 0 feed-forward input", values)
    assert (bad.num_nan, bad.num_inf, bad.largest) == (1, 1, 2.5)
    assert good.norm == pytest.approx(np.sqrt(40))
    assert distance(bad, good) == float("inf")
    assert distance(bad, bad) == 0.0
    assert trace_lines([good, bad], None, 0.1)[-1] == "values are not finite from layer 0 feed-forward input on"
    with pytest.raises(InvalidRequestError, match="other layers"):
        trace_lines([good, bad], [good], 0.1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = tmp_path / "tiny.gguf", tmp_path / "run.json"
    write_tiny_model(model)
    words = ["trace", str(model), "--device", "cpu", "--threads", "1"]
    assert run_app(app, [*words, "Once", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["tokens"] == list(b"Once")
    file.write_text(text)
    assert run_app(app, [*words, "Once", "--against", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["stage", "norm", "largest", "NaN", "inf", "distance"]
    assert lines[-1] == "the two runs agree within 10%"
    assert run_app(app, [*words, "Twice", "--against", str(file)]) == 1
    assert "has other token ids" in capsys.readouterr().err
    file.write_text("{}")
    assert run_app(app, [*words, "Once", "--against", str(file)]) == 1
    assert "is not an output of `realizar trace --json`" in capsys.readouterr().err
