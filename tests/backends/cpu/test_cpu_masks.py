"""A mask forbids ids in its row, before all else acts, and changes nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from backends.cpu.cpu_rows import Part, forward_input, mask_of, plain_decode, run_step
from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.runner import CPUBackend
from realizar.config import EngineConfig
from realizar.engine.frontend.prepare import prepare_request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.workers.service import GrammarService
from resolving import new_core, resolved
from step_inputs import opened_row, results_of, stepped

RECIPE = Recipe(vocab_size=90)  # no multiple of 32
PROMPT = random_tokens(RECIPE, 12, 8)
GREEDY = SamplingParams(temperature=0, logprobs=3)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    config = EngineConfig(threads=1, max_running=4, max_step_tokens=64, kv_cache_bytes=32 << 20)
    made = Runner(*random_model(RECIPE), config)
    yield made
    made.close()


def test_neighbours_are_the_same_bits_as_alone(runner: Runner) -> None:
    expected, logprobs = plain_decode(runner, 0, PROMPT, GREEDY, 12)
    allowed = [3, 31, 32, 64, 89]
    prompts = {0: PROMPT, 1: PROMPT[::-1], 2: PROMPT}
    for row, prompt in prompts.items():
        runner.backend.open(opened_row(row, GREEDY, prompt))
    tokens, computed = dict(prompts), dict.fromkeys(prompts, 0)
    texts: dict[int, list[int]] = {row: [] for row in prompts}
    found = []
    for _ in range(12):
        masks = {1: mask_of(allowed, 90), 2: mask_of(range(90), 90)}
        outputs = run_step(runner, [Part(row, tokens[row], computed[row]) for row in prompts], masks=masks)
        for row, output in zip(prompts, outputs, strict=True):
            computed[row] += len(tokens[row])
            tokens[row] = output.token_ids
            texts[row].extend(output.token_ids)
        found.extend(outputs[0].logprobs)
    for row in prompts:
        runner.backend.close(row)
    assert texts[0] == texts[2] == expected
    assert found == logprobs
    assert set(texts[1]) <= set(allowed)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, top_k=1, seed=1, logprobs=90),
        SamplingParams(temperature=1.5, top_p=0.05, seed=2, logprobs=90),
        SamplingParams(temperature=1.0, min_p=0.9, top_n_sigma=0.1, seed=3, logprobs=90),
        SamplingParams(temperature=0.0, logit_bias={7: 100.0}, logprobs=90),
        SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=0.1, seed=5, logprobs=90),
    ],
)
def test_a_mask_acts_before_the_truncations(runner: Runner, sampling: SamplingParams) -> None:
    """The least probable ids alone are allowed; log-probabilities are the model's own all the same."""
    logits = runner.logits(PROMPT)[-1].astype(np.float64)
    ranked = np.argsort(-logits)
    allowed = [int(token_id) for token_id in ranked[-4:] if token_id != 7]
    runner.backend.open(opened_row(0, sampling, PROMPT))
    (output,) = run_step(runner, [Part(0, PROMPT)], masks={0: mask_of(allowed, 90)})
    runner.backend.close(0)
    assert output.token_ids[0] in allowed
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    (found,) = output.logprobs
    assert found.logprob == pytest.approx(expected[output.token_ids[0]], abs=1e-5)
    assert [token_id for token_id, _ in found.top] == np.argsort(-logits, kind="stable").tolist()


def test_each_token_of_a_row_with_drafts_has_its_own_mask(runner: Runner) -> None:
    """The second mask forbids the second draft, so it is the last token, and the third mask is not read."""
    expected, _ = plain_decode(runner, 0, PROMPT, GREEDY, 3)
    other = (expected[1] + 1) % 90
    masks = np.stack([mask_of(range(90), 90), mask_of([other], 90), mask_of([], 90), mask_of([], 90)])
    runner.backend.open(opened_row(0, GREEDY, PROMPT))
    (output,) = run_step(runner, [Part(0, PROMPT, drafts=expected)], masks={0: masks})
    runner.backend.close(0)
    assert list(output.token_ids) == [expected[0], other]


def test_masks_that_come_too_late_are_refused(runner: Runner) -> None:
    runner.backend.open(opened_row(0, GREEDY, PROMPT))
    step = runner.backend.submit(forward_input(runner, [Part(0, PROMPT)], 6))
    step.result()
    with pytest.raises(RuntimeError, match="after the step"):
        step.set_masks({0: mask_of([1], 90)})
    runner.backend.close(0)


def test_a_held_row_keeps_its_state(runner: Runner) -> None:
    """It computes its last token again, and its sampler has seen nothing of the step in which it was deferred."""
    sampling = SamplingParams(
        temperature=1.0, seed=4, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.9, repetition_penalty=1.4,
        dry_multiplier=4.0, dry_allowed_length=1, logprobs=2, structured=StructuredOutput("regex", "a"),
    )  # fmt: skip
    texts = []
    for holds in (False, True):
        runner.backend.open(opened_row(0, sampling, PROMPT))
        tokens, computed, text = list(PROMPT), 0, []
        for number in range(6):
            if holds:
                step = runner.backend.submit(forward_input(runner, [Part(0, tokens, computed)], 6))
                step.defer([0])
                (output,) = results_of(step.result())
                assert (output.token_ids, output.logprobs) == ((), ())
            mask = mask_of(range(number % 2, 90, 2), 90)
            (output,) = run_step(runner, [Part(0, tokens, computed)], masks={0: mask})
            computed += len(tokens)
            tokens = list(output.token_ids)
            text.append((output.token_ids, output.logprobs))
        runner.backend.close(0)
        texts.append(text)
    assert texts[0] == texts[1]


def decoded(steps_in_flight: int) -> dict[str, list[int]]:
    """Texts of rows with and without grammars, in an engine over the backend. Ids are ASCII from the space on."""
    spec, checkpoint = random_model(RECIPE)
    config = EngineConfig(threads=1, max_running=4, max_step_tokens=64, kv_cache_bytes=32 << 20)
    backend = CPUBackend()
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
    letters = [bytes((0x20 + index,)) for index in range(89)]
    core = new_core(
        backend, spec, config, steps_in_flight=steps_in_flight,
        new_grammars=lambda: GrammarService(GrammarTokens([*letters, b"<end>"], (), (89,), 90)),
    )  # fmt: skip
    patterns = {"a": "[A-Z]{3}-[0-9]{2,9}", "b": "(ab|cde)+", "plain": None}
    for name, pattern in patterns.items():
        structured = None if pattern is None else StructuredOutput("regex", pattern)
        sampling = SamplingParams(seed=3, max_tokens=20, structured=structured)
        core.add(prepare_request(name, PROMPT, sampling, vocab_size=90, max_request_tokens=200, end_ids=(89,)))
    found: dict[str, list[int]] = {name: [] for name in patterns}
    while core.has_work:
        for output in stepped(core):
            found[output.request_id].extend(output.token_ids)
    core.close()
    for name, pattern in patterns.items():
        if pattern is not None:
            text = b"".join(letters[token_id] for token_id in found[name] if token_id != 89).decode()
            assert re.fullmatch(pattern, text) or len(found[name]) == 20
    return found


def test_masks_reach_their_step_with_two_in_flight() -> None:
    """The second step is submitted before the first one's tokens are known."""
    found = decoded(2)
    assert found == decoded(1)
    assert found["a"][-1] == 89
