"""A step that is lost: its requests end with an error, and the engine goes on as if they had never been."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from engine.core.core_runs import run, tokens
from grammar_services import LastingService
from number_text import NumberText
from realizar.backends.base import ForwardInput
from realizar.batch import StepOutput
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import ThreadLink
from realizar.errors import EngineDeadError, RequestFailedError, StepError
from realizar.outputs import RowError
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens
from resolving import EngineClient, new_core
from scripted_backend import VOCAB_SIZE, ScriptedBackend, ScriptedStep, expected_tokens, make_spec
from step_inputs import stepped
from waits import HANG_S

GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(1, 30))
FULL = RowError("full")


class TightBackend(ScriptedBackend):
    """Raises in the submit, or in the result, of the steps named; what such a step was to write is not written."""

    def __init__(self, *, submits: Sequence[int] = (), results: Sequence[int] = (), error: Exception) -> None:
        super().__init__(num_blocks=(64,), block_size=4)
        self.submits, self.results, self.error = submits, results, error

    def close(self, row: int) -> None:
        self.rows.pop(row, None)

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        number = self.num_steps + 1
        if number in self.submits:
            self.num_steps = number
            raise self.error
        if number in self.results:
            self.num_steps = number
            self._last = LostStep(self, self.error, forward_input)  # also raises when the next submit has it sampled
            return self._last
        return super().submit(forward_input)


class LostStep(ScriptedStep):
    def __init__(self, backend: ScriptedBackend, error: Exception, forward_input: ForwardInput) -> None:
        super().__init__(backend, [], forward_input)
        self._tight, self._error = backend, error

    def result(self) -> StepOutput:
        self._tight._last = None
        raise self._error


def make_core(backend: ScriptedBackend, in_flight: int) -> EngineCore:
    config = EngineConfig(max_running=1000, max_step_tokens=16)
    return new_core(backend, make_spec(backend.windows), config, steps_in_flight=in_flight)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("where", ["submits", "results"])
def test_the_requests_of_the_step_end_and_the_engine_goes_on(where: str, step: int, in_flight: int) -> None:
    """The same prompt again: nothing that the lost step was to compute is taken from the cache."""
    backend = TightBackend(**{where: [step]}, error=StepError("attention failed"))  # type: ignore[arg-type]
    core = make_core(backend, in_flight)
    core.add(Request("first", tuple(PROMPT), GREEDY, 8))
    core.add(Request("other", tuple(PROMPT[3:9]), GREEDY, 8))
    core.add(Request("later", tuple(PROMPT[5:20]), GREEDY, 8))
    outputs = run(core)
    failed = {name for name, found in outputs.items() if found[-1].error is not None}
    assert failed
    for name in failed:
        assert outputs[name][-1].error == RowError("attention failed")
        assert [output.error for output in outputs[name][:-1]] == [None] * (len(outputs[name]) - 1)
    for name, prompt in (("first", PROMPT), ("other", PROMPT[3:9]), ("later", PROMPT[5:20])):
        if name not in failed:
            assert tokens(outputs[name]) == expected_tokens(prompt, (None,), GREEDY, 8)
    assert all(group.used == 0 for group in core.cache.counts)
    for name in ("again", "once more"):
        core.add(Request(name, tuple(PROMPT), GREEDY, 8))
        assert tokens(run(core)[name]) == expected_tokens(PROMPT, (None,), GREEDY, 8)
    assert core.scheduler.counts.prefix_cache_hits > 0  # of the last one


def test_requests_that_were_not_in_the_step_go_on() -> None:
    """One waits for a row while the step of all others is lost."""
    backend = TightBackend(submits=[2], error=StepError("full"))
    core = new_core(backend, make_spec(backend.windows), EngineConfig(max_running=2, max_step_tokens=16))
    for name in ("a", "b", "c"):
        core.add(Request(name, (1, 2, 3), GREEDY, 5))
    outputs = run(core)
    assert [outputs[name][-1].error for name in ("a", "b", "c")] == [FULL, FULL, None]
    assert tokens(outputs["c"]) == expected_tokens([1, 2, 3], (None,), GREEDY, 5)


def test_a_request_fails_once_for_all_its_choices() -> None:
    backend = TightBackend(submits=[3], error=StepError("full"))
    core = make_core(backend, 1)
    core.add(Request("a", (1, 2, 3), SamplingParams(temperature=0.0, n=3), 5))
    outputs = run(core)
    assert [output.error for output in outputs["a"]].count(FULL) == 1


@pytest.mark.parametrize(
    "make", [lambda: RuntimeError("CUDA error: an illegal memory access was encountered"), lambda: ValueError("a bug")]
)
def test_any_other_failure_ends_the_engine(make: Callable[[], Exception]) -> None:
    core = make_core(TightBackend(submits=[2], error=make()), 2)
    core.add(Request("a", (1, 2, 3), GREEDY, 5))
    with pytest.raises(EngineDeadError):
        run(core)
    with pytest.raises(EngineDeadError):
        stepped(core)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("where", ["submits", "results"])
def test_grammars_of_lost_steps_are_forgotten(where: str, in_flight: int) -> None:
    """Masks that were on their way to a lost step are not given to the next one."""
    letters = [bytes((0x20 + index,)) for index in range(94)] + [b"<end>", b"<control>"]
    grammars = LastingService(GrammarTokens(letters, (95,), (94,), VOCAB_SIZE))
    for step in range(1, 7):
        backend = TightBackend(**{where: [step]}, error=StepError("full"))  # type: ignore[arg-type]
        core = new_core(
            backend, make_spec((None,)), EngineConfig(), steps_in_flight=in_flight, new_grammars=lambda: grammars
        )
        for name in ("lost", "next"):
            sampling = SamplingParams(stop_token_ids=(94,), structured=StructuredOutput("choice", '["abracadabra"]'))
            core.add(Request(name, (1, 2, 3), sampling, 20))
            outputs = run(core)[name]
            if name == "lost":
                assert outputs[-1].error == FULL
                core.add(Request("plain", (4, 5), GREEDY, 6))
                assert tokens(run(core)["plain"]) == expected_tokens([4, 5], (None,), GREEDY, 6)
            else:
                assert b"".join(letters[token_id] for token_id in tokens(outputs)) == b"abracadabra<end>"
        core.close()
    grammars.end()


def test_waiting_requests_get_the_error() -> None:
    backend = TightBackend(submits=[3], error=StepError("a kernel failed"))
    client = EngineClient(make_core(backend, 1), NumberText, ())
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    with pytest.raises(RequestFailedError, match="a kernel failed"):
        client.submit([1, 2], sampling).result()
    assert len(client.submit([1, 2], sampling).result().outputs[0].token_ids) == 6
    client.close()


def test_a_stream_of_the_server_hears_of_it() -> None:
    backend = TightBackend(submits=[3], error=StepError("a kernel failed"))
    sampling = SamplingParams(temperature=0.0, max_tokens=6)

    async def main() -> None:
        engine = AsyncEngine(ThreadLink(lambda _progress: make_core(backend, 1)), NumberText)
        await engine.start()
        try:
            await asyncio.wait_for(engine.wait_ready(), HANG_S)
            with pytest.raises(RequestFailedError, match="a kernel failed"):
                await (await engine.generate([1, 2], sampling)).result()
            assert engine.state == "ready"
            output = await (await engine.generate([1, 2], sampling)).result()
            assert len(output.outputs[0].token_ids) == 6
        finally:
            await engine.close()

    asyncio.run(main())
