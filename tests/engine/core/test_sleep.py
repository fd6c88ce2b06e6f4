"""An engine that sleeps: no request is open, its KV cache is empty afterwards, and a refusal changes nothing."""

from __future__ import annotations

import pytest

from engine.core.core_runs import run, tokens
from engine.sleeping_backend import SleepingBackend
from realizar.config import EngineConfig
from realizar.errors import CapacityError, EngineUnavailableError, UnsupportedModelError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from resolving import new_core
from scripted_backend import ScriptedBackend, expected_tokens, make_spec
from step_inputs import stepped

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(range(1, 14))


def request(name: str) -> Request:
    return Request(name, PROMPT, GREEDY, 8)


def test_after_sleep_texts_are_the_same_and_no_block_is_found_again() -> None:
    backend = SleepingBackend()
    core = new_core(backend, make_spec(backend.windows), EngineConfig(max_step_tokens=1000))
    wanted = expected_tokens(list(PROMPT), (None,), GREEDY, 8)
    core.add(request("before"))
    assert tokens(run(core)["before"]) == wanted
    assert core.cache.counts[0].cached
    assert core.sleep().num_bytes == 1000
    assert (core.cache.counts[0].cached, core.cache.counts[0].used) == (0, 0)
    core.wake()
    core.add(request("after"))
    outputs = run(core)["after"]
    assert tokens(outputs) == wanted  # the backend checks that every position that is read was computed since
    assert outputs[-1].num_cached_tokens == 0
    core.add(request("cached"))
    assert run(core)["cached"][-1].num_cached_tokens
    assert backend.log == ["sleep", "wake"]


def test_a_request_keeps_it_awake_and_is_refused_while_it_sleeps() -> None:
    backend = SleepingBackend()
    core = new_core(backend, make_spec(backend.windows), EngineConfig(max_step_tokens=1000))
    core.add(request("open"))
    stepped(core)
    with pytest.raises(EngineUnavailableError, match="while a request is open"):
        core.sleep()
    core.abort("open")
    run(core)
    core.sleep()
    for call in (lambda: core.add(request("late")), core.step, core.sleep):
        with pytest.raises(EngineUnavailableError, match="the model is asleep"):
            call()
    core.audit()
    core.wake()
    with pytest.raises(EngineUnavailableError, match="not asleep"):
        core.wake()
    core.add(request("open"))
    assert len(tokens(run(core)["open"])) == 8


def test_a_refusal_leaves_it_as_it_was() -> None:
    backend = SleepingBackend()
    core = new_core(backend, make_spec(backend.windows), EngineConfig(max_step_tokens=1000))
    backend.refusal = CapacityError("the host is full")
    with pytest.raises(CapacityError, match="the host is full"):
        core.sleep()
    core.add(request("awake"))
    assert len(tokens(run(core)["awake"])) == 8
    core.sleep()
    backend.refusal = CapacityError("the GPU is full")
    with pytest.raises(CapacityError, match="the GPU is full"):
        core.wake()
    with pytest.raises(EngineUnavailableError, match="asleep"):
        core.add(request("asleep"))
    core.wake()
    core.add(request("awake"))
    assert len(tokens(run(core)["awake"])) == 8


def test_a_backend_without_memory_of_its_own_refuses() -> None:
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig(max_step_tokens=1000))
    for call in (core.sleep, core.wake):
        with pytest.raises(UnsupportedModelError, match="can't sleep"):
            call()
