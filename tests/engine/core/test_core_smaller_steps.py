"""Memory that runs out in a step: smaller steps take its place, and only what does not fit alone ends with an error."""

from __future__ import annotations

from collections import defaultdict

import pytest

from engine.core.core_runs import run, tokens
from grammar_services import LastingService
from number_text import NumberText
from realizar.backends.base import ForwardInput
from realizar.config import EngineConfig
from realizar.errors import CapacityError, StepMemoryError
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.scheduler.plan import StepLimit
from realizar.structured.grammar_tokens import GrammarTokens
from resolving import EngineClient, new_core
from scripted_backend import VOCAB_SIZE, ScriptedBackend, ScriptedStep, expected_tokens, make_spec
from step_inputs import TokenOutput, rows_of, stepped

GREEDY = SamplingParams(temperature=0.0)
POISON = 91  # a token that no step fits with


class SmallBackend(ScriptedBackend):
    """Has memory for so many rows and tokens of a step, and raises in the submit or in the result of larger ones."""

    def __init__(self, rows: int, tokens: int, *, late: bool, max_step_tokens: int = 64) -> None:
        super().__init__(num_blocks=(96,), block_size=4, max_step_tokens=max_step_tokens)
        self.room, self.late = (rows, tokens), late
        self.sizes: list[tuple[int, int]] = []

    def fits(self, step: ForwardInput) -> bool:
        opened = [self.rows[row.row] for row in rows_of(step)]
        poisoned = any(POISON in row.tokens[: row.num_prompt_tokens] for row in opened)
        return len(rows_of(step)) <= self.room[0] and len(step.columns.token_ids) <= self.room[1] and not poisoned

    def close(self, row: int) -> None:
        self.rows.pop(row, None)

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        fits = self.fits(forward_input)
        if not fits:
            if not self.late:
                self.num_steps += 1
                raise CapacityError("the GPU is out of memory: tried 2 GiB")
            self.num_steps += 1
            self._last = LateStep(self, forward_input)
            return self._last
        self.sizes.append((len(rows_of(forward_input)), len(forward_input.columns.token_ids)))
        return super().submit(forward_input)


class LateStep(ScriptedStep):
    """Whoever asks for its result, or has it sampled, hears that it did not fit."""

    def __init__(self, backend: SmallBackend, forward_input: ForwardInput) -> None:
        super().__init__(backend, [], forward_input)
        self._small = backend

    def result(self) -> None:  # type: ignore[override]
        self._small._last = None
        raise CapacityError("the GPU is out of memory: tried 2 GiB")


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["submit", "result"])
@pytest.mark.parametrize("room", [(3, 64), (8, 20), (1, 16)])
def test_requests_go_on_in_smaller_steps(room: tuple[int, int], late: bool, in_flight: int) -> None:
    """Their tokens are as without the lack of memory, whatever had been put out before it."""
    backend = SmallBackend(8, 64, late=late)
    core = new_core(backend, make_spec((None,)), EngineConfig(max_step_tokens=64), steps_in_flight=in_flight)
    prompts = {str(index): list(range(1 + index, 12 + 5 * index)) for index in range(6)}
    samplings = {name: GREEDY if index % 2 else SamplingParams(seed=index) for index, name in enumerate(prompts)}
    for name, prompt in prompts.items():
        core.add(Request(name, tuple(prompt), samplings[name], 20))
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    for _ in range(6):
        for output in stepped(core):
            outputs[output.request_id].append(output)
    backend.room = room
    backend.sizes.clear()
    for name, more in run(core).items():
        outputs[name] += more
    for name, prompt in prompts.items():
        assert [output.error for output in outputs[name]] == [None] * len(outputs[name])
        assert tokens(outputs[name]) == expected_tokens(prompt, (None,), samplings[name], 20)
    assert max(rows for rows, _ in backend.sizes) <= room[0]
    assert max(count for _, count in backend.sizes) <= room[1]
    assert all(group.used == 0 for group in core.cache.counts)
    assert core.scheduler.counts.prefix_cache_queries == sum(map(len, prompts.values())), (
        "once for each, started again or not"
    )


@pytest.mark.parametrize("late", [False, True], ids=["submit", "result"])
def test_what_does_not_fit_alone_ends_and_the_others_do_not(late: bool) -> None:
    backend = SmallBackend(8, 64, late=late)
    core = new_core(backend, make_spec((None,)), EngineConfig(max_step_tokens=64), steps_in_flight=2)
    for index in range(4):
        core.add(Request(f"good {index}", (1 + index, 2, 3), GREEDY, 12))
    core.add(Request("poison", (5, POISON, 6), GREEDY, 12))
    outputs = run(core)
    (ended,) = [output for output in outputs["poison"] if output.error is not None]
    assert ended.error is not None
    assert (ended.error.message, ended.error.cause) == ("the GPU is out of memory: tried 2 GiB", "memory")
    for index in range(4):
        assert tokens(outputs[f"good {index}"]) == expected_tokens((1 + index, 2, 3), (None,), GREEDY, 12)
    core.add(Request("after", (1, 2), GREEDY, 5))
    assert tokens(run(core)["after"]) == expected_tokens((1, 2), (None,), GREEDY, 5)


@pytest.mark.parametrize("late", [False, True], ids=["submit", "result"])
def test_a_prompts_log_probabilities_are_asked_for_again(late: bool) -> None:
    """All log-probabilities come, once each and in order."""
    backend = SmallBackend(8, 64, late=late)
    core = new_core(backend, make_spec((None,)), EngineConfig(max_step_tokens=64), steps_in_flight=2)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    prompt = tuple(range(1, 60))
    core.add(Request("whole", prompt, sampling, 3))
    expected = [entry for output in run(core)["whole"] for entry in output.prompt_logprobs]
    assert len(expected) == len(prompt) - 1
    backend.room = (8, 20)
    core.add(Request("again", prompt, sampling, 3, cache_salt="other"))
    assert [entry for output in run(core)["again"] for entry in output.prompt_logprobs] == expected


def test_a_grammar_goes_on_where_it_was() -> None:
    letters = [bytes((0x20 + index,)) for index in range(94)] + [b"<end>", b"<control>"]
    grammars = LastingService(GrammarTokens(letters, (95,), (94,), VOCAB_SIZE))
    backend = SmallBackend(8, 64, late=True)
    core = new_core(
        backend, make_spec((None,)), EngineConfig(), steps_in_flight=2, new_grammars=lambda: grammars
    )  # fmt: skip
    sampling = SamplingParams(stop_token_ids=(94,), structured=StructuredOutput("choice", '["abracadabra"]'))
    for name in ("one", "two"):
        core.add(Request(name, (1, 2, 3), sampling, 20))
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    for _ in range(6):
        for output in stepped(core):
            outputs[output.request_id].append(output)
    backend.room = (1, 64)
    for name, more in run(core).items():
        outputs[name] += more
    for name in ("one", "two"):
        assert b"".join(letters[token_id] for token_id in tokens(outputs[name])) == b"abracadabra<end>"
    core.close()
    grammars.end()


def test_requests_that_wait_for_one_that_fits_in_no_step_get_the_error() -> None:
    backend = SmallBackend(8, 64, late=False)
    core = new_core(backend, make_spec((None,)), EngineConfig(max_step_tokens=64))
    client = EngineClient(core, NumberText, ())
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    with pytest.raises(StepMemoryError, match="the GPU is out of memory"):
        client.submit([1, POISON], sampling).result()
    assert len(client.submit([1, 2], sampling).result().outputs[0].token_ids) == 6
    client.close()


def test_steps_grow_again() -> None:
    limit = StepLimit(8, 512)
    assert limit.failed(1, 8, 500)
    assert (limit.rows, limit.tokens) == (4, 250)
    assert limit.failed(1, 4, 30)
    assert (limit.rows, limit.tokens) == (2, 16)
    assert limit.is_short
    for _ in range(6 * 64):
        limit.fitted()
    assert (limit.rows, limit.tokens, limit.is_short) == (8, 512, False)
    assert limit.failed(1, 1, 40)
    assert limit.failed(2, 1, 16), "which of two it was is not known"
    assert not limit.failed(1, 1, 16)
