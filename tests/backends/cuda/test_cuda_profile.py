"""The GPU's side of a profile: its launches under the interpreter, and timing by events, with made-up events."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.inspection.backend import read_values  # noqa: E402
from realizar.backends.cuda.inspection.launch_times import EventClock, read_limit, time_launches  # noqa: E402
from realizar.bench.profile import StepWork, one_step, open_rows, time_steps  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import RealizarError  # noqa: E402

RECIPE = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="Q8_0", windows=(None, 8))


def test_launches_of_a_step_under_the_interpreter() -> None:
    spec, checkpoint = random_model(RECIPE)
    config = EngineConfig(max_running=1, max_step_tokens=16, context_length=32, kv_cache_dtype="int8")
    runner = GPURunner(spec, checkpoint, config)
    work = StepWork(1, 1, 12, repeats=2)
    step = one_step(runner.capacity, work)
    assert time_steps(runner.backend, step, work, in_flight=2) > 0
    open_rows(runner.backend, step)
    times = time_launches(runner.backend, step, work.repeats)
    layers = len(spec.layers)
    per_layer = ("qkv", "rope", "attention", "attention output", "output", "gate and up", "activation", "down")
    assert Counter(each.part for each in times) == {
        "embed": 1, "norm": 2 * layers + 1, **dict.fromkeys(per_layer, layers), "final norm": 1, "head": 1, "choose": 1,
    }  # fmt: skip
    read: Counter[str] = Counter()
    for each in times:
        read[each.part] += each.bytes_read
        assert each.seconds >= 0
    seen = sum(13 if layer.mixer.window is None else 8 for layer in spec.layers)
    assert read["attention"] == seen * 2 * (32 + 2)  # keys and values of one head in int8, a float16 scale for each
    assert sum(read.values()) - read["attention"] == runner.capacity.weight_bytes
    if not torch.cuda.is_available():
        limit = read_limit(runner.backend, repeats=1)
        assert min(limit.gb_per_s, limit.size_bytes) > 0
    runner.close()


def test_launches_of_layers_with_inputs_and_keys_of_another() -> None:
    """Each block's stream is read once, and shared keys and values are read by both layers."""
    spec, checkpoint = random_model(replace(RECIPE, windows=(None, None), sources=(None, 0), input_size=32))
    config = EngineConfig(max_running=1, max_step_tokens=16, context_length=32, kv_cache_dtype="int8")
    runner = GPURunner(spec, checkpoint, config)
    step = one_step(runner.capacity, StepWork(1, 1, 12, repeats=1))
    open_rows(runner.backend, step)
    times = time_launches(runner.backend, step, 1)
    found = Counter(each.part for each in times)
    assert (found["layer inputs"], found["input gate"], found["input projection"]) == (4, 2, 2)
    assert (found["qkv"], found["q"], found["rope"], found["attention"], found["norm"]) == (1, 1, 2, 2, 7)
    assert [each.bytes_read for each in times if each.part == "attention"] == [13 * 2 * (32 + 2)] * 2
    stages = [each.stage for each in read_values(runner.backend, spec, step)]
    assert stages[:3] == ["layer 0 attention input", "layer 0 feed-forward input", "layer 0 input gate input"]
    assert stages[3] == "layer 1 shared attention input"
    assert stages[-2:] == ["last layer output", "logits"]
    runner.close()


class Device:
    """A stream with a clock: a hold ends at a time, and the host takes `host_s` for everything that it starts."""

    def __init__(self, host_s: float) -> None:
        self.host_s, self.now_s, self.done_s = host_s, 0.0, 0.0
        self.holds: list[float] = []

    def start(self, seconds: float) -> None:
        self.now_s += self.host_s
        self.done_s = max(self.done_s, self.now_s) + seconds

    def hold(self, cycles: int) -> None:
        self.holds.append(cycles / 2e9)
        self.start(cycles / 2e9)

    def wait(self, _device: object) -> None:
        self.now_s = max(self.now_s, self.done_s)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Device:
    device = Device(request.param)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            device.start(2e-6)
            self.at_s = device.done_s

        def query(self) -> bool:
            return self.at_s <= device.now_s

        def elapsed_time(self, after: Event) -> float:
            return (after.at_s - self.at_s) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", device.hold)
    monkeypatch.setattr(torch.cuda, "synchronize", device.wait)
    return device


@pytest.mark.parametrize("made_up", [1e-6, 1e-4], indirect=True)
def test_events_leave_the_host_out(made_up: Device) -> None:
    """A host a hundred times slower than the launches: the hold grows, and what is found is the device's."""
    wanted = [(1 + number % 7) * 1e-6 for number in range(230)]
    found = EventClock(torch.device("cpu")).seconds([lambda each=each: made_up.start(each) for each in wanted])
    assert found == pytest.approx(wanted, abs=1e-9)
    slow = made_up.host_s > 1e-5
    assert (len(made_up.holds) > 3) == slow
    assert made_up.holds == sorted(made_up.holds)


@pytest.mark.parametrize("made_up", [0.1], indirect=True)
def test_a_host_that_is_too_slow_is_reported(made_up: Device) -> None:
    with pytest.raises(RealizarError, match="too busy"):
        EventClock(torch.device("cpu")).seconds([lambda: made_up.start(1e-6)] * 100)
