"""A model whose layers several devices compute: the same tokens as of one, whoever shares a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.ranks.test_ranked_backend import loaded, mixed_requests, run_all, texts_of
from realizar.backends.devices import THE_CPU
from realizar.backends.select import plan_load, plan_memory, resolve_model
from realizar.backends.spans import resolve
from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint
from realizar.errors import CapacityError, InvalidRequestError
from realizar.models.generated.shapes import SHAPES
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from tiny_model import write_tiny_model

_CONFIG = EngineConfig(threads=1, context_length=256, max_running=4, max_step_tokens=64, kv_cache_bytes=16 << 20)
_ALONE = replace(_CONFIG, device="cpu")
_DELTA = "tiny-delta of 8 layers"


@pytest.fixture(autouse=True)
def processors_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "choose_device", lambda _name: THE_CPU)
    monkeypatch.setitem(SHAPES, _DELTA, replace(SHAPES["tiny-delta"], num_layers=8))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("spans") / "tiny.gguf"
    write_tiny_model(found)
    return found


@pytest.mark.parametrize(
    ("shape", "layers_on"),
    [("tiny-moe", "cuda=1,cpu=rest"), ("tiny-window", "cpu=rest,cuda:3=1"), (_DELTA, "cuda=4,cpu=4")],
)
def test_the_bits_of_one_device(shape: str, layers_on: str, tmp_path: Path) -> None:
    """Prompts in chunks beside answers, found prefixes, samplers, masks, drafts of the text."""
    path = tmp_path / "model.gguf"
    write_tiny_model(path, shape=shape)
    changes = [{}, {"drafter": "lookup", "speculative_tokens": 3}]
    for change in changes:
        with loaded(replace(_ALONE, **change), path) as core:
            alone = texts_of(run_all(core, mixed_requests()))
        with loaded(replace(_CONFIG, layers_on=layers_on, **change), path) as core:
            assert core.config.steps_in_flight == 1
            assert texts_of(run_all(core, mixed_requests())) == alone
            assert texts_of(run_all(core, mixed_requests())) == alone
            assert core.scheduler.counts.prefix_cache_hits > 0


def test_three_devices_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs are refused until they have shown it; what hands streams on takes any number."""

    def read(text: str) -> tuple[tuple[str, int | None], ...]:
        parts = (part.partition("=") for part in text.split(","))
        return tuple((device, None if count == "rest" else int(count)) for device, _, count in parts)

    for module in ("realizar.config", "realizar.backends.spans.resolve"):
        monkeypatch.setattr(f"{module}.read_layers_on", read)
    monkeypatch.setitem(SHAPES, "three", replace(SHAPES["tiny-moe"], num_layers=3))
    path = tmp_path / "model.gguf"
    write_tiny_model(path, shape="three")
    with loaded(_ALONE, path) as core:
        alone = texts_of(run_all(core, mixed_requests()))
    with loaded(replace(_CONFIG, layers_on="cuda:0=1,cuda:1=1,cpu=rest"), path) as core:
        assert [(span.first, span.stop) for span in core.config.spans] == [(0, 1), (1, 2), (2, 3)]
        assert texts_of(run_all(core, mixed_requests())) == alone


def test_pooled_states_and_scores_are_the_last_devices(path: Path) -> None:
    prompt, greedy = tuple(range(3, 90)), SamplingParams(temperature=0.0, prompt_logprobs=2)
    requests = [Request("score", prompt, greedy, 2), Request("mean", prompt, greedy, 0, pooling="mean")]
    found = []
    for config in (_ALONE, replace(_CONFIG, layers_on="cuda=1,cpu=1")):
        with loaded(config, path) as core:
            found.append(run_all(core, requests))
    one, other = found
    assert texts_of(one) == texts_of(other)
    assert other["mean", 0][-1].pooled is not None
    assert one["mean", 0][-1].pooled == other["mean", 0][-1].pooled


def test_each_device_has_room_for_its_layers(path: Path) -> None:
    checkpoint = find_checkpoint(path)
    spec, config = resolve_model(checkpoint, replace(_CONFIG, layers_on="cuda=1,cpu=rest"))
    assert [(span.first, span.stop) for span in config.spans] == [(0, 1), (1, 2)]
    whole, alone = resolve_model(checkpoint, _ALONE)
    one = plan_memory(whole, checkpoint, alone)
    plan = plan_load(spec, checkpoint, config)
    first, last = plan.of_spans
    assert plan.weight_bytes == first.weight_bytes + last.weight_bytes
    assert 0 < plan.weight_bytes - one.weight_bytes < 64 << 10  # the head that nobody reads
    assert first.weight_bytes < last.weight_bytes  # which has the head
    assert plan.contexts[-1].request_bytes == one.contexts[-1].request_bytes
    assert plan.kv_limit_bytes <= 16 << 20
    plan.check_one_fits()
    short = plan_memory(spec, checkpoint, config, last.needed_bytes - 1)
    with pytest.raises(CapacityError, match="does not fit"):
        short.check_weights_fit()
    with pytest.raises(CapacityError, match="does not fit"):
        short.check_one_fits()


@pytest.mark.parametrize(
    ("layers_on", "reason"),
    [
        ("cuda=3,cpu=rest", "gives out 3 layers and a rest, and the model has 2"),
        ("cuda=2,cpu=rest", "gives out 2 layers and a rest, and the model has 2"),
        ("cuda=1,cpu=2", "gives out 3 layers and no rest, and the model has 2"),
        ("cuda=1", "gives out 1 layers and no rest, and the model has 2"),
    ],
)
def test_layers_that_are_not_there(layers_on: str, reason: str, path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        resolve_model(find_checkpoint(path), replace(_CONFIG, layers_on=layers_on))


@pytest.mark.parametrize(
    ("layers_on", "reason"),
    [
        ("gpu=3", "'gpu=3' is no device with its layers"),
        ("cuda:0=0,cpu=rest", "'cuda:0=0' is no device"),
        ("cuda:0=3,,cpu=rest", "'' is no device"),
        ("cuda:0=3,cuda:1=rest", "names one GPU so far once, not 2 times"),
        ("cpu=3,cpu=rest", "names the CPU once, not 2 times"),
        ("cuda=rest,cpu=rest", "to one device, not to several"),
    ],
)
def test_what_does_not_read_as_layers(layers_on: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        replace(_CONFIG, layers_on=layers_on)


@pytest.mark.parametrize(
    "beside",
    [
        {"device": "cpu"},
        {"tensor_parallel": 2},
        {"cache_dir": "/tmp"},
        {"drafter": "other.gguf"},
        {"host_snapshot_bytes": 1 << 20},
    ],
)
def test_options_that_are_for_one_device(beside: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=f"layers_on and {next(iter(beside))} can't be combined"):
        replace(_CONFIG, layers_on="cuda=1,cpu=rest", **beside)  # type: ignore[arg-type]
