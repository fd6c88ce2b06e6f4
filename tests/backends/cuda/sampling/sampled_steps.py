"""Steps whose logits a test names, sampled by the CUDA kernels or on the host."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.device import open_device
from realizar.backends.cuda.sampling.host_step_sampler import HostStepSampler
from realizar.backends.cuda.sampling.native_kernels import SamplingKernels
from realizar.backends.cuda.sampling.native_step_sampler import NativeStepSampler
from realizar.backends.cuda.sampling.step_sampler import StepSampler
from realizar.backends.cuda.step import CUDAStep, Finished, WantedTokens, wanted_tokens
from realizar.backends.cuda.workspace import LOGIT_BLOCK
from realizar.backends.host_sampler import HostSampler
from realizar.batch import StepRows
from realizar.sampling_params import SamplingParams
from step_inputs import RowOutput, ScheduledRow, opened_row, results_of, step_input

CONTEXT = 160


class Arrays(dict[str, torch.Tensor]):
    """A step's arrays on the device, as far as samplers read them."""

    def __init__(self, rows: int, selected: int, device: torch.device) -> None:
        self.sizes = SimpleNamespace(rows=rows, selected=selected)
        lengths = {"ids": 2 * selected + 16, "selected_rows": selected, "contexts": rows}
        super().__init__({name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in lengths.items()})
        self["selected_rows"].fill_(-1)


class SampledSteps:
    """Open rows and a sampler.

    Args:
        on_host: the host samples, and not the CUDA kernels.
        places: sampled tokens of a row in a step, at most.
        graphs: steps of decodes replay graphs of the kernels.
    """

    def __init__(self, rows: int, vocab: int, *, on_host: bool = False, places: int = 1, graphs: bool = False) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.vocab, count = vocab, rows * places
        blocks = -(-vocab // LOGIT_BLOCK)
        arrays = Arrays(rows, count, self.device)
        self.space: Any = SimpleNamespace(
            arrays=arrays,
            logits=torch.zeros((count, vocab), device=self.device),
            block_tops=torch.zeros((count, blocks), device=self.device),
            block_ids=torch.zeros((count, blocks), dtype=torch.int32, device=self.device),
            sampled=torch.zeros(count, dtype=torch.int32, device=self.device),
            last=torch.zeros(rows, dtype=torch.int32, device=self.device),
        )
        self.maker: StepSampler
        if on_host:
            self.maker = HostStepSampler(self.space, HostSampler(rows, vocab, CONTEXT, 1, lambda _name: None))
            return
        profile = open_device()
        kernels = SamplingKernels(profile.torch_device, vocab, dependent=profile.has_dependent_launch)
        self.maker = NativeStepSampler(self.space, CONTEXT, kernels)
        if graphs:
            self.maker.capture()

    def open(self, row: int, sampling: SamplingParams, history: list[int], prompt: int = 6, choice: int = 0) -> None:
        self.maker.open(opened_row(row, sampling, history, min(prompt, len(history)), choice))

    def step(
        self, rows: list[ScheduledRow], logits: Any, masks: dict[int, Any] | None = None, deferred: Collection[int] = ()
    ) -> list[RowOutput]:
        """The outputs of rows, given the logits of their wanted tokens, float32 [tokens, vocab]."""
        return self._run(step_input(rows, (), ()), logits, masks or {}, deferred)

    def decode(
        self, rows: list[int], lengths: list[int], logits: Any, masks: Any = None, deferred: Collection[int] = ()
    ) -> list[RowOutput]:
        """The outputs of a step of decodes: rows of so many tokens, and their logits, float32 [rows, vocab]."""
        numbers, computed = np.array(rows), np.array(lengths, np.int32) - np.int32(1)
        columns = StepRows.of_decodes(numbers, numbers, computed, np.zeros(len(rows), np.int32))
        return self._run(ForwardInput(columns, computed, (), ()), logits, masks or {}, deferred)

    def _run(self, given: ForwardInput, logits: Any, masks: Any, deferred: Collection[int] = ()) -> list[RowOutput]:
        values = torch.as_tensor(logits).to(self.device)
        self._run_head(values)
        wanted = wanted_tokens(given)
        self._send(given, wanted)

        def finish(step: CUDAStep) -> Finished:
            return self.maker.finish(step, [range(len(step.wanted.tokens))], lambda _step: {})

        step = CUDAStep(given, wanted, finish, self.device)
        step.set_masks(masks)
        step.defer(deferred)
        return list(results_of(step.result()))

    def _send(self, given: ForwardInput, wanted: WantedTokens) -> None:
        """Write the step's arrays, as a runner does."""
        arrays, columns = self.space.arrays, given.columns
        owners = np.where(columns.num_drafts > 0, -1, columns.numbers)[wanted.rows[: wanted.num_sampled]]
        arrays["selected_rows"].fill_(-1)
        for name, values in (
            ("ids", given.columns.token_ids), ("selected_rows", owners), ("contexts", columns.num_context_tokens),
        ):  # fmt: skip
            arrays[name][: len(values)] = torch.from_numpy(values.astype(np.int32)).to(self.device)

    def _run_head(self, values: torch.Tensor) -> None:
        """Write what the head's kernels leave: logits, the largest of each block, the largest of all."""
        space, count = self.space, values.shape[0]
        space.logits[:count] = values
        for block, part in enumerate(values.split(LOGIT_BLOCK, dim=1)):
            top = part.max(dim=1)
            broken = torch.isnan(part).any(dim=1)
            space.block_tops[:count, block] = torch.where(broken, float("inf"), top.values)
            first = (part == top.values[:, None]).to(torch.uint8).argmax(dim=1)
            space.block_ids[:count, block] = (first + block * LOGIT_BLOCK).int()
        tops = space.block_tops[:count].max(dim=1).values
        best = (values == tops[:, None]).to(torch.uint8).argmax(dim=1).int()
        space.sampled[:count] = torch.where(torch.isfinite(tops), best, -1)
