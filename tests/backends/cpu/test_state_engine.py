"""A model with states through the engine: the same text and log-probabilities whatever steps it took to get them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.late_service import LateService
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.runner import CPUBackend, CPUStep
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.row_grammars import Patience
from realizar.engine.llm import LLM
from realizar.errors import CapacityError, StepError
from realizar.outputs import TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.scheduler.row_table import Sequence as Scheduled
from resolving import new_core, resolved
from scripted_backend import VOCAB_SIZE
from step_inputs import TokenOutput, stepped
from structured.grammar_engines import END
from tiny_model import write_tiny_model

RECIPE = Recipe(vocab_size=VOCAB_SIZE, windows=(None,) * 3, recurrent=("convolution", None, "convolution"), length=3)
MOST_DRAFTS, COUNT = 4, 50
Text = tuple[list[int], list[TokenLogprobs]]


class PartlyRight:
    """Proposes the text that is to come, with a wrong token somewhere in most proposals."""

    awaits_results = True

    def __init__(self, texts: Mapping[str, Sequence[int]]) -> None:
        self._texts, self.num_right, self.num_wrong, self._calls = texts, 0, 0, 0

    def propose(self, sequences: Sequence[Scheduled]) -> list[tuple[int, ...]]:
        return [self._drafts(each) for each in sequences]

    def _drafts(self, sequence: Scheduled) -> tuple[int, ...]:
        self._calls += 1
        done = len(sequence.token_ids) - sequence.request.num_prompt_tokens
        coming = list(self._texts[sequence.request.request_id][done : done + self._calls % (MOST_DRAFTS + 1)])
        wrong = self._calls % 7
        if wrong < len(coming):
            coming[wrong] = (coming[wrong] + 1) % VOCAB_SIZE
        return tuple(coming)

    def verified(self, sequence: Scheduled, num_drafts: int, num_accepted: int) -> None:
        self.num_right += num_accepted
        self.num_wrong += num_drafts - num_accepted

    def forget(self, sequence_id: int) -> None:
        """It keeps nothing."""


def make_core(*, rows: int = 6, contexts: int = 6, drafts: int = 0, **options: Any) -> EngineCore:
    """An engine with room for so many whole contexts of 128 tokens."""
    spec, checkpoint = random_model(RECIPE)
    config = EngineConfig(
        threads=1, context_length=128, max_running=rows, max_step_tokens=48, speculative_tokens=drafts,
        kv_cache_bytes=contexts * 5 * 32 * 512, kv_cache_dtype="f16",
    )  # fmt: skip
    backend = CPUBackend()
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
    return new_core(backend, spec, config, **options)


def requests() -> list[Request]:
    """Prompts of one token, of several chunks, and of text that repeats; greedy and sampled."""
    found = []
    for index, length in enumerate((1, 2, 3, 9, 30, 60, 70, 5)):
        sampling = SamplingParams(temperature=float(index % 2), seed=index, logprobs=2)
        tokens = tuple(random_tokens(RECIPE, length, index))
        prompt = (tokens * 4)[:60] if index == 3 else tokens
        found.append(Request(f"r{index}", prompt, sampling, COUNT))
    return found


def run(core: EngineCore, wanted: Sequence[Request], disturb: Any = lambda _step: None) -> dict[str, Text]:
    """The text of each request and its log-probabilities; the engine is audited after every step."""
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    for request in wanted:
        core.add(request)
    step = 0
    while core.has_work:
        disturb(step)
        for output in stepped(core):
            assert output.error is None or output.request_id.startswith("lost"), output.error
            outputs[output.request_id].append(output)
        core.audit()
        step += 1
    return {
        name: ([i for each in found for i in each.token_ids], [i for each in found for i in each.logprobs])
        for name, found in outputs.items()
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Text]:
    """What each request gets in an engine of one row, a token a step."""
    core = make_core(rows=1)
    found = {name: text for each in requests() for name, text in run(core, [each]).items()}
    core.close()
    assert all(len(tokens) == COUNT for tokens, _ in found.values())
    return found


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("drafts", [0, MOST_DRAFTS])
def test_many_rows_drafts_and_preemptions(alone: dict[str, Text], in_flight: int, drafts: int) -> None:
    drafter = PartlyRight({name: tokens for name, (tokens, _) in alone.items()}) if drafts else None
    core = make_core(contexts=2, drafts=drafts, drafter=drafter, steps_in_flight=in_flight)
    assert run(core, requests()) == alone
    assert core.scheduler.counts.num_preemptions > 0
    if drafter is not None:
        assert min(drafter.num_right, drafter.num_wrong) > 20
    core.close()


def test_prompt_lookup_drafts(alone: dict[str, Text]) -> None:
    core = make_core(drafts=MOST_DRAFTS)
    assert run(core, requests()) == alone
    assert core.scheduler.counts.draft_tokens > 0
    core.close()


def test_requests_that_are_aborted_leave_nothing_in_their_rows(alone: dict[str, Text]) -> None:
    """Others take their rows at once, with two steps in flight."""
    core = make_core(rows=2, steps_in_flight=2)
    lost = [replace(each, request_id=f"lost-{each.request_id}") for each in requests()[::-1]]

    def disturb(step: int) -> None:
        if step % 5 == 4 and lost:
            core.abort(lost.pop().request_id)

    found = run(core, [each for pair in zip(list(lost), requests(), strict=True) for each in pair], disturb)
    assert {name: text for name, text in found.items() if not name.startswith("lost")} == alone
    assert not lost
    core.close()


@pytest.mark.parametrize("error", [CapacityError, StepError])
def test_a_step_that_fails(alone: dict[str, Text], error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a step without memory start again; those of a step whose kernel failed end, and others go on."""
    core = make_core(rows=3, drafts=MOST_DRAFTS)
    walk, failing = CPUBackend.walk, [9]

    def fail(self: CPUBackend, program: Any) -> None:
        failing[0] -= program is self.model.body
        if not failing[0]:
            failing[0] = -1
            raise error("no step today")
        walk(self, program)

    monkeypatch.setattr(CPUBackend, "walk", fail)
    outputs: dict[str, list[int]] = defaultdict(list)
    for request in requests():
        core.add(request)
    ended = set()
    while core.has_work:
        for output in stepped(core):
            outputs[output.request_id] += output.token_ids
            if output.error is not None:
                ended.add(output.request_id)
        core.audit()
    assert bool(ended) == (error is StepError)
    assert {name: tokens for name, tokens in outputs.items() if name not in ended} == {
        name: tokens for name, (tokens, _) in alone.items() if name not in ended
    }
    core.close()


@pytest.fixture(scope="module")
def service() -> Iterator[LateService]:
    made = LateService()
    yield made
    made.end()


@pytest.mark.parametrize(("in_flight", "drafts"), [(1, 0), (2, 0), (1, MOST_DRAFTS), (2, MOST_DRAFTS)])
def test_rows_that_are_deferred(
    service: LateService, in_flight: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that come several steps late, beside rows without a grammar."""
    monkeypatch.setattr(Patience, "left_s", lambda *_: 0.0)
    grammar = StructuredOutput("regex", "[a-z]{10,30}")
    wanted = [
        replace(each, sampling=replace(each.sampling, structured=grammar, stop_token_ids=(END,))) if index % 3 else each
        for index, each in enumerate(requests())
    ]
    monkeypatch.setattr(service, "lateness", lambda row: 0)
    core = make_core(rows=1, new_grammars=lambda: service)
    expected = {name: text for each in wanted for name, text in run(core, [each]).items()}
    core.close()
    deferred = 0
    defer = CPUStep.defer

    def count(self: CPUStep, rows: Collection[int]) -> None:
        nonlocal deferred
        deferred += len(rows)
        defer(self, rows)

    monkeypatch.setattr(CPUStep, "defer", count)
    monkeypatch.setattr(service, "lateness", lambda row: (row.slot * 7 + len(row.output) * 3) % 5)
    drafter = PartlyRight({name: tokens for name, (tokens, _) in expected.items()}) if drafts else None
    core = make_core(drafts=drafts, drafter=drafter, steps_in_flight=in_flight, new_grammars=lambda: service)
    assert run(core, wanted) == expected
    assert deferred > 20
    core.close()


def test_from_a_file_to_text(tmp_path: Path) -> None:
    """A GGUF file through `LLM`: all prompts together with drafts, and each alone without."""
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, shape="tiny-convolution")
    prompts = ["x", "abcabcabcabc", "The quick brown fox jumps over the lazy dog. " * 4]
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(path, threads=1, max_running=1) as llm:
        alone = [llm.generate(prompt, sampling)[0].outputs[0].text for prompt in prompts]
    with LLM(path, threads=1, speculative_tokens=4, max_step_tokens=32) as llm:
        assert [each.outputs[0].text for each in llm.generate(prompts, sampling)] == alone
    assert len(set(alone)) == 3
