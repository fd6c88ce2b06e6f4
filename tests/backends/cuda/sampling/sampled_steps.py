"""Steps whose logits a test names, sampled by torch or by the CUDA kernels."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch

from realizar.backends.cuda.device import open_device
from realizar.backends.cuda.sampling.choices import ChoiceMaker
from realizar.backends.cuda.sampling.native_choices import NativeChoiceMaker
from realizar.backends.cuda.sampling.native_kernels import SamplingKernels
from realizar.backends.cuda.sampling.sampler import SCRATCH_BYTES_PER_ID, DeviceSampler
from realizar.backends.cuda.sampling.step_sampler import StepSampler
from realizar.backends.cuda.step import CUDAStep, PendingResult, wanted_tokens
from realizar.backends.cuda.workspace import LOGIT_BLOCK
from realizar.batch import RowOutput, ScheduledRow
from realizar.sampling_params import SamplingParams
from step_inputs import opened_row, step_input

CONTEXT = 160


class Arrays(dict[str, torch.Tensor]):
    """A step's arrays on the device, as far as samplers read them."""

    def __init__(self, rows: int, selected: int) -> None:
        super().__init__()
        self.sizes = SimpleNamespace(rows=rows, selected=selected)


class SampledSteps:
    """Open rows and a sampler.

    Args:
        at_once: rows that torch samples at once; None for the CUDA kernels.
        places: choices of a row in a step, at most.
    """

    def __init__(self, rows: int, vocab: int, at_once: int | None = None, places: int = 1) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.vocab, count = vocab, rows * places
        blocks = -(-vocab // LOGIT_BLOCK)
        arrays = Arrays(rows, count)
        arrays["ids"] = torch.zeros(2 * count + 16, dtype=torch.int32, device=self.device)
        self.space: Any = SimpleNamespace(
            arrays=arrays,
            logits=torch.zeros((count, vocab), device=self.device),
            block_tops=torch.zeros((count, blocks), device=self.device),
            block_ids=torch.zeros((count, blocks), dtype=torch.int32, device=self.device),
            choices=torch.zeros(count, dtype=torch.int32, device=self.device),
            last=torch.zeros(rows, dtype=torch.int32, device=self.device),
        )
        self.maker: StepSampler
        if at_once is None:
            profile = open_device()
            kernels = SamplingKernels(profile.torch_device, vocab, dependent=profile.has_dependent_launch)
            self.maker = NativeChoiceMaker(self.space, CONTEXT, kernels)
        else:
            scratch = at_once * SCRATCH_BYTES_PER_ID * vocab
            self.maker = ChoiceMaker(self.space, DeviceSampler(rows, vocab, CONTEXT, self.device, scratch))

    def open(self, row: int, sampling: SamplingParams, history: list[int], prompt: int = 6, choice: int = 0) -> None:
        self.maker.open(opened_row(row, sampling, history, min(prompt, len(history)), choice))

    def step(
        self, rows: list[ScheduledRow], logits: Any, masks: dict[int, Any] | None = None, held: Collection[int] = ()
    ) -> list[RowOutput]:
        """The outputs of rows, given the logits of their wanted tokens, float32 [tokens, vocab]."""
        given = step_input(rows, (), ())
        values = torch.as_tensor(logits).to(self.device)
        self._run_head(values)
        self.space.arrays["ids"][: len(given.token_ids)] = torch.from_numpy(given.token_ids).to(self.device)

        def finish(step: CUDAStep) -> PendingResult:
            chosen = self.maker.make(step)
            logprobs = self.maker.start_logprobs(step, range(len(step.wanted.tokens)))
            result = chosen.cpu()
            if result.device != chosen.device:
                torch.cuda.synchronize()
            return PendingResult(result, logprobs, {}, self.maker.errors, None)

        step = CUDAStep(given, wanted_tokens(given), finish, self.maker.take_in, self.device)
        step.set_masks(masks or {})
        step.hold(held)
        return list(step.result().rows)

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
        space.choices[:count] = torch.where(torch.isfinite(tops), best, -1)
