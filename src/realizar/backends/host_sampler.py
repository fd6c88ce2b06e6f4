"""`HostSampler`: the CPU's sampler for a backend whose device can't sample. The CPU's kernels load when one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from realizar.batch import OpenedRow, StepRows

if TYPE_CHECKING:
    from realizar.backends.cpu.sampling.kernel import SamplingKernel
    from realizar.backends.cpu.sampling.step_sampler import StepSampler


class HostSampler:
    """Parameters and states of open rows, and the threads that sample; `on_compile` is called if it has to compile."""

    def __init__(
        self, max_rows: int, vocab_size: int, context_length: int, threads: int, on_compile: Callable[[str], None]
    ) -> None:
        from realizar.backends.cpu.compile_ahead import CompileAhead
        from realizar.backends.cpu.sampling.kernel import SAMPLING_KERNELS
        from realizar.backends.cpu.sampling.rows import SamplingRows

        self._vocab_size, self._threads = vocab_size, threads
        with CompileAhead(SAMPLING_KERNELS, threads, on_compile):
            self._rows = SamplingRows(max_rows, vocab_size, context_length)

    def open(self, opened: OpenedRow) -> None:
        """Start a row; InvalidRequestError where `logit_bias` names an id beyond the vocabulary."""
        self._rows.open(opened)

    def close(self, row: int) -> None:
        self._rows.close(row)

    def follow_grammars(self, numbers: NDArray[np.intp]) -> bool:
        """True if any of these rows, intp [rows], follows a grammar."""
        return self._rows.follow_grammars(numbers)

    def begin(self, columns: StepRows, masks: Mapping[int, NDArray[np.uint32]]) -> StepSampler:
        """The sampler of a step, which reads logits on the host; the step before must have read its own."""
        from realizar.backends.cpu.sampling.step_sampler import StepSampler

        return StepSampler(self._kernel, self._rows, columns, masks)

    @cached_property
    def _kernel(self) -> SamplingKernel:
        """With the first step, so that a load that fails leaves no thread."""
        from realizar.backends.cpu.sampling.kernel import SamplingKernel
        from realizar.backends.cpu.threads import ThreadTeam

        return SamplingKernel(self._vocab_size, ThreadTeam(self._threads))

    def shutdown(self) -> None:
        if "_kernel" in vars(self):
            self._kernel.team.close()
