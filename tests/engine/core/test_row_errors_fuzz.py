"""Rows that fail at random, in every mixture: requests that end well have the right tokens, and every audit passes."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from realizar.batch import OpenedRow
from realizar.config import EngineConfig
from realizar.errors import StepError
from realizar.outputs import RowError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from resolving import new_core
from scripted_backend import ScriptedBackend, ScriptedStep, expected_tokens, make_spec
from step_inputs import RowOutput, ScheduledRow, stepped

FAILS = 90  # the first token of requests whose rows may fail
NUM_IDS = 7  # few, so that drafts come true


class RandomFaults(ScriptedBackend):
    """Now and then a row can't be opened, gives an error, or a whole step fails."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(num_blocks=(20,), block_size=4, max_rows=4, num_ids=NUM_IDS)
        self.rng = rng

    def open(self, opened: OpenedRow) -> None:
        super().open(opened)
        if opened.history[0] == FAILS and self.rng.random() < 0.5:
            raise ValueError("a bug")

    def close(self, row: int) -> None:
        self.rows.pop(row, None)

    def submit(self, forward_input: Any) -> ScriptedStep:
        if self.rng.random() < 0.02:
            raise StepError("a kernel failed")
        step = super().submit(forward_input)
        honest = step._row_output

        def row_output(row: ScheduledRow, states: list[int]) -> RowOutput:
            output = honest(row, states)
            fails = row.sample and self.rows[row.row].tokens[0] == FAILS and self.rng.random() < 0.3
            return RowOutput((), error=RowError("failed")) if fails else output

        step._row_output = row_output  # type: ignore[method-assign]
        return step


def random_request(rng: random.Random, name: str) -> Request:
    first = FAILS if rng.random() < 0.4 else rng.randrange(1, 4)
    prompt = (first, *(rng.randrange(5) for _ in range(rng.randrange(1, 20))))
    sampling = SamplingParams(temperature=0.0, n=rng.choice([1, 1, 3]), prompt_logprobs=rng.choice([None, 1]))
    return Request(name, prompt, sampling, rng.randrange(1, 12))


@pytest.mark.parametrize("seed", range(20))
def test_random_failures(seed: int) -> None:
    rng = random.Random(seed)
    config = EngineConfig(
        max_running=4, max_step_tokens=rng.choice([3, 8, 16]), speculative_tokens=rng.choice([0, 0, 3])
    )
    core = new_core(RandomFaults(rng), make_spec((None,)), config, steps_in_flight=rng.choice([1, 2]))
    requests = [random_request(rng, str(number)) for number in range(rng.randrange(4, 14))]
    waiting, failed = list(requests), set()
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    ended: set[tuple[str, int]] = set()
    while waiting or core.has_work:
        if waiting and rng.random() < 0.5:
            core.add(waiting.pop())
        if rng.random() < 0.03:
            core.abort(rng.choice(requests).request_id)
        for output in stepped(core) if core.has_work else ():
            assert output.request_id not in failed, "an output follows a request's last"
            if output.error is not None:
                failed.add(output.request_id)
            found[output.request_id, output.choice].extend(output.token_ids)
            if output.finish_reason is not None:
                ended.add((output.request_id, output.choice))
        core.audit()
    for request in requests:
        for choice in range(request.sampling.n):
            if (request.request_id, choice) in ended and request.request_id not in failed:
                wanted = expected_tokens(
                    request.prompt_token_ids, (None,), request.sampling, request.max_tokens, num_ids=NUM_IDS
                )
                assert found[request.request_id, choice] == wanted
    assert all(group.used == 0 for group in core.cache.counts)
