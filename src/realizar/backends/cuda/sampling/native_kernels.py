"""`SamplingKernels`: the sampler's kernels, compiled at load, and their launches. torch."""

from __future__ import annotations

import torch

from realizar.backends.cuda.native.compiler import architecture, begin_compiling, compile_sources
from realizar.backends.cuda.native.launcher import Kernel
from realizar.backends.cuda.native.sampling.source import SELECT_BYTES, TILE, sampling_sources
from realizar.backends.cuda.sampling.native_buffers import NativeBuffers
from realizar.backends.cuda.sampling.native_rows import ADJUST, CUT, DRAW, DRY

ALL_PLACES = -1  # of drafts


class SamplingKernels:
    """Starts kernels on torch's current stream; `dependent` ones may start while the one before them ends.

    Raises KernelError where they don't compile, or the device refuses them.
    """

    def __init__(self, device: torch.device, vocab_size: int, *, dependent: bool) -> None:
        self._device, self._dependent = device, dependent
        (source, of_cuts), arch = sampling_sources(), _architecture(device)
        cubin, cuts = compile_sources([source, of_cuts], arch)
        names = (
            "list_sampled", "adjust_logits", "penalise_repetitions", "find_tops", "count_history", "weigh_ids",
            "weigh_left", "gather_ids", "survey_ids", "settle_rows", "extend_repetitions",
        )  # fmt: skip
        shared = dict.fromkeys(names, 0) | {"report_logprobs": SELECT_BYTES}
        shared["pick_ids"] = 8 * -(-vocab_size // TILE)  # the sums of all tiles
        self._kernels = {name: Kernel(cubin, name, size, source.name) for name, size in shared.items()}
        self._kernels["cut_ids"] = Kernel(cuts, "cut_ids", SELECT_BYTES, of_cuts.name)

    @staticmethod
    def begin(device: torch.device) -> None:
        """Have them compiled in processes: of all kernels of a load these take longest."""
        begin_compiling(sampling_sources(), _architecture(device))

    def list_sampled(self, buffers: NativeBuffers, count: int) -> None:
        """Write the records of a step all of whose rows sample, one for each of so many tokens with logits."""
        self._run("list_sampled", (-(-count // 128), 1), 128, buffers.tables, buffers.tokens, count)

    def prepare(self, buffers: NativeBuffers, count: int, flags: int) -> None:
        """Write adjusted logits of the records that need them, and weigh ids; `flags` are those of all records."""
        tables, tokens = buffers.tables, buffers.tokens
        if flags & ADJUST:
            self._run("adjust_logits", (buffers.tiles, count), 256, tables, tokens)
            if flags & DRY:
                self._run("penalise_repetitions", (count, 1), 512, tables, tokens, count)
                self._run("find_tops", (buffers.tiles, count), 256, tables, tokens)
        if flags & DRAW:
            self._run("weigh_ids", (buffers.spans, count), 512, tables, tokens, ALL_PLACES)

    def pick(self, buffers: NativeBuffers, count: int, flags: int, place: int = ALL_PLACES, *, drafted: bool) -> None:
        """Truncate, and sample: only records after `place` drafts, if given.

        Rows take their tokens in unless `settle` follows, as it must if `drafted`.
        """
        read = buffers.tables, buffers.tokens, place
        if flags & CUT:
            self._run("gather_ids", (buffers.spans, count), 512, *read)
            self._run("cut_ids", (count, 1), 1024, *read)
            self._run("weigh_left", (buffers.spans, count), 512, *read)
        self._run("pick_ids", (count, 1), 256, *read, int(drafted))

    def settle(self, buffers: NativeBuffers, rows: int, most: int) -> None:
        """Compare sampled tokens with drafts; rows take in those that stand."""
        grid = -(-rows // 128), 1
        self._run("settle_rows", grid, 128, buffers.tables, buffers.drafted, rows, buffers.draft_table, most)

    def extend(self, buffers: NativeBuffers, count: int, flags: int) -> None:
        """Take the sampled tokens that stand into DRY's tables."""
        if flags & DRY:
            self._run("extend_repetitions", (count, 1), 1024, buffers.tables, buffers.tokens, count)

    def count_history(self, counts: torch.Tensor, tokens: torch.Tensor, num_prompt_tokens: int) -> None:
        """Add a history to a row's counts, int32 [vocab]."""
        size = tokens.numel()
        grid = -(-size // 256), 1
        self._run("count_history", grid, 256, counts, tokens, num_prompt_tokens, size, counts.numel())

    def logprobs(self, buffers: NativeBuffers, lines: torch.Tensor, most: int) -> None:
        """Write log-probabilities of as many queries as `lines`, float64 [queries, 3 + 2 * most], has rows.

        A query of slot -1 wants nothing, and its line stays as it is.
        """
        count = lines.shape[0]
        self._run("survey_ids", (buffers.spans, count), 512, buffers.tables, buffers.queries)
        self._run("report_logprobs", (count, 1), 1024, buffers.tables, buffers.queries, lines, most)

    def _run(self, name: str, grid: tuple[int, int], threads: int, *arguments: torch.Tensor | int) -> None:
        sizes = "".join("p" if isinstance(each, torch.Tensor) else "i" for each in arguments)
        values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        stream = int(torch.cuda.current_stream(self._device).cuda_stream)
        self._kernels[name].launch((*grid, 1), threads, values, sizes, stream, self._dependent)


def _architecture(device: torch.device) -> str:
    return architecture(torch.cuda.get_device_capability(device))
