"""A step's results as its rows' outputs: columns where they can be, rows by themselves where they have more."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from realizar.backends.base import ForwardInput  # noqa: E402
from realizar.backends.cuda.sampling.logprobs import PendingLogprobs  # noqa: E402
from realizar.backends.cuda.sampling.results import PendingResult  # noqa: E402
from realizar.backends.cuda.step import CUDAStep, wanted_tokens  # noqa: E402
from realizar.batch import StepOutput, StepRows  # noqa: E402
from realizar.outputs import RowError  # noqa: E402
from step_inputs import (  # noqa: E402
    results_of,
    scheduled_row,
    step_rows,
)

ROWS, LISTED = 6, 3
FAILED, NOT_FINITE, PLAIN = (
    1,
    2,
    4,
)  # rows whose token is an error, whose logits are unusable, without log-probabilities


def result_of(columns: StepRows, errors: dict[int, RowError]) -> StepOutput:
    """The output of rows that decode, of which all but one list log-probabilities, of different lengths."""
    lines = torch.arange(ROWS * (3 + 2 * LISTED), dtype=torch.float64).reshape(ROWS, -1)
    lines[NOT_FINITE, 2] = math.nan
    lines[:, 3 + LISTED - 1] = math.nan  # beyond a list of two nothing is written
    asked = [index for index in range(ROWS) if index != PLAIN]
    sampled = torch.arange(20, 20 + ROWS, dtype=torch.int32)[:, None].clone()
    sampled[FAILED] = -1
    logprobs = PendingLogprobs([2 if index else 0 for index in asked], lines[asked])

    def finish(_step: CUDAStep) -> PendingResult:
        return PendingResult(sampled, sampled, [(asked, logprobs)], errors, take_in)

    def take_in(_numbers: Any, _sampled: Any) -> Any:
        raise AssertionError("no row has drafts")

    given = ForwardInput(columns, np.full(ROWS, 7, np.int32), (), ())
    return CUDAStep(given, wanted_tokens(given), finish, torch.device("cpu")).result()


@pytest.mark.parametrize("errors", [{}, {3: RowError("a bug")}])
def test_steps_of_decodes_alone_give_what_others_give(errors: dict[int, RowError]) -> None:
    """Only in a step of decodes alone are log-probabilities given to rows without a look at each row's share."""
    numbers, tokens = np.arange(ROWS)[::-1].copy(), np.ones(ROWS, np.int32)
    decodes = StepRows.of_decodes(np.arange(ROWS), numbers, tokens * 7, tokens)
    assert decodes.only_decodes
    mixed = step_rows([scheduled_row(int(number), (1,), 7, True) for number in numbers])
    assert not mixed.only_decodes
    found, wanted = (result_of(columns, errors) for columns in (decodes, mixed))
    failed = -1 if errors else 23
    assert found.sampled.tolist() == wanted.sampled.tolist() == [[20], [-1], [-1], [failed], [24], [25]]
    assert dict(found.errors) == dict(wanted.errors)
    assert sorted(found.logprobs) == sorted(wanted.logprobs) == sorted({0, 3, 5} - errors.keys())
    assert results_of(found) == results_of(wanted)
    assert results_of(found)[0].token_ids == (20,)
    assert results_of(found)[0].logprobs[0].top == ()
    assert len(results_of(found)[5].logprobs[0].top) == 2
    for index in (FAILED, NOT_FINITE):
        assert "not finite" in found.errors[index].message
    assert results_of(found)[3].error == errors.get(3)
