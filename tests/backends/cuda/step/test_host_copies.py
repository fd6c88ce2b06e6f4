"""Copies of results to the host: their places, and the memory of steps that were read or not. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from realizar.backends.base import ForwardInput  # noqa: E402
from realizar.backends.cuda.finish import StepFinisher  # noqa: E402
from realizar.backends.cuda.sampling.logprobs import PendingLogprobs  # noqa: E402
from realizar.backends.cuda.sampling.native_step_sampler import (  # noqa: E402
    HostCopies,
    NativeStepSampler,
)
from realizar.backends.cuda.step import CUDAStep, wanted_tokens  # noqa: E402
from realizar.batch import StepRows  # noqa: E402
from step_inputs import results_of  # noqa: E402

ROWS = 3


def test_copies_lie_one_after_the_other_until_the_next_step() -> None:
    copies = HostCopies(64, torch.device("cpu"))
    given = torch.arange(3, dtype=torch.int32), torch.arange(4.0, dtype=torch.float64).view(2, 2), torch.arange(9.0)
    found = [copies.copy(tensor) for tensor in given]
    for tensor in given:
        tensor.zero_()
    assert [each.tolist() for each in found] == [[0, 1, 2], [[0.0, 1.0], [2.0, 3.0]], [float(n) for n in range(9)]]
    assert found[1].data_ptr() - found[0].data_ptr() == 16
    assert found[2].untyped_storage().data_ptr() != found[0].untyped_storage().data_ptr()  # it did not fit
    copies.begin()
    assert copies.copy(given[0]).data_ptr() == found[0].data_ptr()


class Sampler(NativeStepSampler):
    """Chooses the step's number for each row, and lists it with its negative as a log-probability."""

    def __init__(self, space: Any) -> None:
        self._space, self._free, self.step = space, [], 0
        self._rows: Any = SimpleNamespace(take_in=None)
        self.made = torch.zeros((ROWS, 1), dtype=torch.int32)
        self.lines = torch.zeros((ROWS, 5), dtype=torch.float64)

    def make(self, _step: CUDAStep) -> torch.Tensor:
        self.step += 1
        self.made.fill_(self.step)
        self.lines.copy_(torch.tensor([self.step, 1, -self.step, self.step, -self.step], dtype=torch.float64))
        return self.made

    def start_logprobs(self, _step: CUDAStep, part: range, copy: Any) -> Any:
        return [(np.arange(len(part)), PendingLogprobs([1] * len(part), copy(self.lines)))]


def test_results_stay_what_they_were_while_other_steps_run() -> None:
    """Two steps in flight, one that nobody reads, and results that are looked at when their memory serves another."""
    space: Any = SimpleNamespace(arrays=SimpleNamespace(sizes=SimpleNamespace(selected=ROWS)), logits=torch.zeros(1))
    sampler = Sampler(space)
    finisher = StepFinisher(space, SimpleNamespace(), (), sampler)  # type: ignore[arg-type]
    rows, ones = np.arange(ROWS), np.ones(ROWS, np.int32)
    given = ForwardInput(StepRows.of_decodes(rows, rows, ones, ones), ones, (), ())

    def submit() -> CUDAStep:
        step = CUDAStep(given, wanted_tokens(given), finisher.finish, torch.device("cpu"))
        step.sample()
        return step

    lost = submit()
    waiting, outputs = submit(), []
    for _ in range(6):
        following = submit()
        outputs.append(waiting.result())
        waiting = following
    assert len(sampler._free) == 1  # with that of the step in flight two, and a third that is lost
    for number, output in enumerate(outputs, start=2):
        assert output.sampled.tolist() == [[number]] * ROWS
        for row in results_of(output):
            (entry,) = row.logprobs
            assert (entry.token_id, entry.logprob, entry.top) == (number, -number, ((number, -number),))
    assert lost.result().sampled.tolist() == [[1]] * ROWS
