"""The records of log-probabilities: sent where they changed, read by a graph or by launches. No GPU is needed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.cuda.sampling.test_native_records import space_of  # noqa: E402
from backends.reference_sampler.logprobs import token_logprobs  # noqa: E402
from realizar.backends.base import ForwardInput  # noqa: E402
from realizar.backends.cuda.sampling.logprobs import start_logprobs  # noqa: E402
from realizar.backends.cuda.sampling.native_buffers import MOST_IN_GRAPH  # noqa: E402
from realizar.backends.cuda.sampling.native_step_sampler import NativeStepSampler  # noqa: E402
from realizar.backends.cuda.step import wanted_tokens  # noqa: E402
from realizar.batch import LogprobQuery, StepRows  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import (  # noqa: E402
    opened_row,
    scheduled_row,
    step_rows,
)

ROWS, VOCAB = 8, 9000


class Kernels:
    """Writes each query's slot, target and length in place of its numbers."""

    def __init__(self) -> None:
        self.launched = 0
        self.count_history = None  # no row has penalties

    def logprobs(self, buffers: Any, lines: torch.Tensor, most: int) -> None:
        self.launched += 1
        assert lines.shape[1] == 3 + 2 * most
        for query, line in zip(buffers.queries[: len(lines), :3].tolist(), lines, strict=True):
            if query[0] >= 0:
                line[:3] = torch.tensor(query, dtype=torch.float64)


class Asking:
    """Open rows of a sampler whose log-probabilities have graphs, and counts of what it sends and starts."""

    def __init__(self) -> None:
        self.kernels = Kernels()
        self.maker = NativeStepSampler(space_of(ROWS, ROWS, VOCAB), 64, self.kernels)  # type: ignore[arg-type]
        graphs: Any = self.maker._logprob_graphs
        graphs._graphs = {(count, 0): SimpleNamespace(replay=partial(self._replay, count)) for count in graphs._counts}
        self.replayed: list[int] = []
        self.sent = 0
        send: Any = self.maker._send

        def counted(*arguments: Any) -> None:
            self.sent += 1
            send(*arguments)

        self.maker._send = counted  # type: ignore[method-assign]

    def _replay(self, count: int) -> None:
        self.replayed.append(count)
        self.maker._launch_logprobs(count, 0)

    def open(self, row: int, logprobs: int | None) -> None:
        self.maker.open(opened_row(row, SamplingParams(temperature=0.0, logprobs=logprobs), [1]))

    def asked(self, columns: StepRows) -> dict[int, tuple[float, ...]]:
        """Slot, target and length of each wanted token, as the kernels read them."""
        positions = np.zeros(len(columns.token_ids), np.int32)
        given = ForwardInput(columns, positions, (), ())
        step: Any = SimpleNamespace(wanted=wanted_tokens(given), forward_input=given)
        parts = self.maker.start_logprobs(step, range(len(step.wanted.tokens)), torch.clone)
        found: dict[int, tuple[float, ...]] = {}
        for indices, pending in parts:
            assert len(indices) == len(pending.top_n) == len(pending.lines)
            found.update(zip(list(indices), map(tuple, pending.lines[:, :3].tolist()), strict=True))
        return found

    def decode(self, *numbers: int) -> dict[int, tuple[float, ...]]:
        rows, ones = np.array(numbers), np.ones(len(numbers), np.int32)
        return self.asked(StepRows.of_decodes(rows, rows, ones, ones))


def test_records_are_sent_where_they_changed() -> None:
    asking = Asking()
    for row, logprobs in ((0, 5), (1, None), (2, 0), (3, 5)):
        asking.open(row, logprobs)
    assert asking.decode(1) == {}
    assert (asking.sent, asking.replayed) == (0, [])
    expected = {0: (0, -1, 5), 2: (2, -1, 0), 3: (3, -1, 5)}
    assert asking.decode(0, 1, 2, 3) == expected
    assert asking.decode(0, 1, 2, 3) == expected
    assert (asking.sent, asking.replayed) == (1, [4, 4])  # three queries, padded
    assert asking.decode(3, 2, 0) == {0: (0, -1, 5), 1: (1, -1, 0), 2: (2, -1, 5)}
    assert asking.decode(0) == {0: (0, -1, 5)}
    assert asking.decode(0, 1, 2, 3) == expected
    assert (asking.sent, asking.replayed) == (4, [4, 4, 4, 1, 4])


def test_a_row_that_asks_otherwise_is_asked_anew() -> None:
    """The same rows decode as in the step before, but one was closed and opened again."""
    asking = Asking()
    for row in (0, 1):
        asking.open(row, 5)
    assert asking.decode(0, 1) == asking.decode(0, 1) == {0: (0, -1, 5), 1: (1, -1, 5)}
    asking.maker.close(1)
    asking.open(1, 3)
    assert asking.decode(0, 1) == {0: (0, -1, 5), 1: (1, -1, 3)}
    asking.maker.close(0)
    asking.open(0, None)
    assert asking.decode(0, 1) == asking.decode(0, 1) == {1: (1, -1, 3)}
    assert asking.decode(1) == {0: (0, -1, 3)}
    assert (asking.sent, asking.replayed) == (4, [2, 2, 2, 1, 1, 1])


def test_no_graph_is_kept_or_replayed_once_they_are_freed() -> None:
    asking = Asking()
    asking.open(0, 5)
    assert asking.decode(0) == {0: (0, -1, 5)}
    asking.maker.release()
    assert asking.decode(0) == {0: (0, -1, 5)}
    assert (asking.sent, asking.replayed, asking.kernels.launched) == (2, [1], 2)


def test_a_long_list_is_launched() -> None:
    """So is what follows it, whose records are sent again."""
    asking = Asking()
    asking.open(0, 3)
    asking.open(1, MOST_IN_GRAPH + 1)
    assert asking.decode(0) == {0: (0, -1, 3)}
    assert asking.decode(0, 1) == {0: (0, -1, 3), 1: (1, -1, MOST_IN_GRAPH + 1)}
    assert (asking.sent, asking.replayed, asking.kernels.launched) == (2, [1], 2)
    assert asking.decode(0) == {0: (0, -1, 3)}
    assert (asking.sent, asking.replayed) == (3, [1, 1])


def test_queries_beside_choices() -> None:
    """Prompt scoring in a step whose other rows want log-probabilities of sampled tokens."""
    asking = Asking()
    for row, logprobs in ((0, 2), (1, 1), (2, None)):
        asking.open(row, logprobs)
    queries = LogprobQuery(0, 77, 4), LogprobQuery(1, None, 0)
    rows = (
        scheduled_row(0, (1,), 3, True), scheduled_row(1, (1,), 3, True),
        scheduled_row(2, (1, 2, 3), 0, False, logprob_queries=queries),
    )  # fmt: skip
    expected = {0: (0, -1, 2), 1: (1, -1, 1), 2: (2, 77, 4), 3: (3, -1, 0)}
    assert asking.asked(step_rows(rows)) == expected
    assert asking.replayed == [4]


def test_long_lists_by_torch() -> None:
    """Few distinct values, so that equal logits occur, and some forbidden ids."""
    rng = np.random.default_rng(5)
    values = np.round(rng.standard_normal((4, 300)) * 8).astype(np.float32) / np.float32(2)
    values[rng.random(values.shape) < 0.02] = -np.inf
    for row, token_id, top_n in zip(values, (int(values[0].argmax()), 44, 0, 7), (3, 0, 20, 1), strict=True):
        pending = start_logprobs(torch.from_numpy(row[None]), torch.tensor([token_id]), top_n, torch.clone)
        (_, columns, _), *_ = pending.groups()
        ((found,),) = columns.apart()
        expected = token_logprobs(row, token_id, top_n)
        assert found.token_id == expected.token_id
        assert found.rank == expected.rank
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-6)
        assert [i for i, _ in found.top] == [i for i, _ in expected.top]
        assert [p for _, p in found.top] == pytest.approx([p for _, p in expected.top], abs=1e-6)
