"""`CUDABackend`: a model loaded and stepped on a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import Capacity, DeviceMemory, ForwardInput
from realizar.backends.cuda.attention.bind import AttentionBinder
from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.attention.rope_tables import RopeTables
from realizar.backends.cuda.bind import Binder
from realizar.backends.cuda.decisions import describe_card, describe_refused, describe_routes
from realizar.backends.cuda.device import DeviceProfile, free_bytes, open_device
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.finish import StepFinisher
from realizar.backends.cuda.graphs import GraphRunner
from realizar.backends.cuda.kernel_sizes import attention_parts, compute_type, tile_tokens
from realizar.backends.cuda.launch import Launch, StepLaunch
from realizar.backends.cuda.matmul.fp8_copies import check_device, sum_type
from realizar.backends.cuda.matmul.linears import MergedLinear, copy_to_fp8, partial_floats
from realizar.backends.cuda.matmul.merging import Merger
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.plan import plan_memory
from realizar.backends.cuda.sampling.sampler import DeviceSampler, reserved_bytes, scratch_bytes
from realizar.backends.cuda.shapes import (
    chunk_shapes,
    mixed_shapes,
    padded_rows,
    padded_tokens,
    row_counts,
    step_sizes,
    token_counts,
)
from realizar.backends.cuda.step import CUDAStep, WantedTokens, wanted_tokens
from realizar.backends.cuda.step_arrays import StepShape, count_decodes, tiles_of
from realizar.backends.cuda.supported import SUPPORTED
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.parts import cached_tokens_read
from realizar.backends.program import Program, build_program
from realizar.backends.resolved_config import ResolvedConfig
from realizar.batch import OpenedRow
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import DeviceLostError
from realizar.models.check_tensors import check_tensors
from realizar.models.spec import Linear, ModelSpec

_LOG = logging.getLogger(__name__)


class CUDABackend:
    """The `Backend` of GPUs. A step runs while the host prepares the next; each samples before the next starts.

    Args:
        progress: told of loading: what is being done, and the share done, 0 to 1.
        device: where to run; None takes the first GPU.
    """

    def __init__(
        self, progress: Callable[[str, float], None] | None = None, device: DeviceProfile | None = None
    ) -> None:
        self._progress = progress or (lambda _what, _share: None)
        self._device = device
        self._pending: CUDAStep | None = None
        self._loaded = False

    def load(self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig) -> None:
        start = time.perf_counter()
        SUPPORTED.check(spec)
        check_tensors(spec, checkpoint)
        device = self._device or open_device()
        with device_errors(device.torch_device):
            self._load(spec, checkpoint, config, device)
        self._capacity = Capacity(
            block_size=config.block_size, num_blocks=self._kv.num_blocks, max_rows=config.max_running,
            max_step_tokens=config.max_step_tokens, context_length=self._context,
            weight_bytes=self._weights.size_bytes + self._copy_bytes,
            weight_bytes_per_token=self._weights.size_bytes, kv_cache_bytes=self._kv.size_bytes,
            kv_cache_dtype=self._kv.dtype, load_s=time.perf_counter() - start,
        )  # fmt: skip
        _LOG.info("loaded %s on %s", spec.architecture, device.name)

    def _load(self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, device: DeviceProfile) -> None:
        self._spec, self._device = spec, device
        if config.fp8_copies:
            check_device(device)
        self._context = config.context_length
        if device.is_gpu:
            plan_memory(spec, checkpoint, config, free_bytes(device)).check_weights_fit()
        program = build_program(spec)
        body, tail = program.block_matmuls(), program.tail.matmuls()
        self._weights = Weights(spec, checkpoint, device)
        self._load_weights(checkpoint, body + tail)
        matmuls = MatmulKernels(device.torch_device, config.batch_invariant) if device.has_cuda_kernels else None
        compute = compute_type(config.kv_dtype, device)
        sizes = step_sizes(spec, config, tile_tokens(spec, compute))
        parts = attention_parts(spec, row_counts(sizes.rows), self._context, device, config.batch_invariant)
        self._space = Workspace(spec, sizes, device, compute, parts)
        self._ropes = RopeTables(spec, self._context, device.torch_device)
        rows, vocab = config.max_running, spec.vocab_size
        scratch = scratch_bytes(rows, vocab, device.memory_bytes)
        self._sampler = DeviceSampler(rows, vocab, self._context, device.torch_device, scratch)
        reserved = reserved_bytes(rows, vocab, self._context, device.memory_bytes)
        merger = Merger(program, self._weights, device, matmuls)
        counts = {*row_counts(sizes.rows), *token_counts(sizes.tokens)}
        layers, head = ([merger.merge(group) for group in part] for part in (body, tail))
        self._copy_bytes = 0
        if config.fp8_copies and matmuls is not None:
            copying = partial(self._progress, "copying weights to FP8")
            self._copy_bytes = copy_to_fp8(layers + head, matmuls, sum_type(device), copying)
        head_counts = {*row_counts(sizes.rows), *row_counts(sizes.selected)}
        self._prepare(matmuls, layers, counts, head, head_counts)
        self._space.size_partials(max(partial_floats(layers, counts), partial_floats(head, head_counts)))
        self._kv = KVMemory(spec, config, device, reserved)
        self._bind(program, merger, config)
        self._log_decisions(device, str(compute), matmuls, layers + head, counts)
        self._loaded, self._captures = True, config.graphs
        self._warm_up(layers)

    def _bind(self, program: Program, merger: Merger, config: ResolvedConfig) -> None:
        assert self._device is not None
        attention = AttentionBinder(
            self._weights,
            self._space,
            self._kv,
            self._ropes,
            self._device,
            self._context,
            fixed_splits=config.batch_invariant,
        )
        binder = Binder(self._spec, self._weights, self._space, attention, merger)
        self._graphs = GraphRunner(binder.bind_body(program), binder.bind_tail(program.tail), self._space, self._device)
        sizes = self._space.arrays.sizes
        self._attention = attention
        attention.prepare([*self._decode_shapes(), *mixed_shapes(sizes)])
        self._finisher = StepFinisher(self._space, self._graphs, binder.bind_pool(program.tail), self._sampler)

    def _log_decisions(
        self, device: DeviceProfile, compute: str, matmuls: MatmulKernels | None, linears: list[MergedLinear],
        counts: set[int],
    ) -> None:  # fmt: skip
        _LOG.info("%s", describe_card(device, compute.removeprefix("torch."), self._kv.dtype))
        if not _LOG.isEnabledFor(logging.DEBUG):
            return
        for line in (*describe_refused(matmuls), *describe_routes(linears, counts)):
            _LOG.debug("%s", line)

    def _prepare(
        self, matmuls: MatmulKernels | None, layers: list[MergedLinear], counts: set[int], head: list[MergedLinear],
        head_counts: set[int],
    ) -> None:  # fmt: skip
        """Compile the CUDA matmuls of every padded number of rows, side by side."""
        if matmuls is not None:
            parts = (layers, counts), (head, head_counts)
            wanted = [
                kernel for linears, rows in parts for linear in linears for n in rows for kernel in linear.kernels(n)
            ]
            matmuls.prepare(
                wanted, lambda done, total: self._progress("compiling matmul kernels", done / max(1, total))
            )

    def _warm_up(self, layers: list[MergedLinear]) -> None:
        """Compile all that steps can need, and capture the graphs."""
        assert self._device is not None
        if not self._device.is_gpu:
            return
        sizes = self._space.arrays.sizes
        self._space.arrays.clear()
        self._warm_chunks(layers, mixed_shapes(sizes))
        for rows in row_counts(sizes.selected):
            self._graphs.run_eagerly(StepShape(0, 0, 0), rows)
        self._finisher.warm()
        shapes = self._decode_shapes() + chunk_shapes(sizes)
        stage = "capturing graphs" if self._captures else "compiling steps"
        self._graphs.prepare(shapes, lambda share: self._progress(stage, share), capture=self._captures)

    def _warm_chunks(self, layers: list[MergedLinear], shapes: Sequence[StepShape]) -> None:
        """Run one step of each kind: of those that start the same kernels, compiled for the same constants."""
        seen: set[object] = set()
        of_tokens: dict[int, object] = {}
        for done, shape in enumerate(shapes):
            tokens = shape.tokens
            if tokens not in of_tokens:
                matmuls = tuple((one.forms(tokens), one.splits(tokens), one.is_gated(tokens)) for one in layers)
                of_tokens[tokens] = matmuls, tuple(self._space.launching(tokens).items())
            kind = of_tokens[tokens], self._attention.kind(shape)
            if kind not in seen:
                seen.add(kind)
                self._graphs.run_eagerly(shape, 0)
            self._progress("compiling chunks", (done + 1) / len(shapes))

    def _load_weights(self, checkpoint: Checkpoint, groups: Iterable[Sequence[Linear]]) -> None:
        total, done = max(1, checkpoint.size_bytes), 0

        def loaded(size: int) -> None:
            nonlocal done
            done += size
            self._progress("loading weights", min(1.0, done / total))

        self._weights.load(groups, loaded)

    def capacity(self) -> Capacity:
        return self._capacity

    def device_memory(self) -> DeviceMemory | None:
        if not self.device.is_gpu:
            return None
        free, total = torch.cuda.mem_get_info(self.device.torch_device)
        return DeviceMemory(int(total - free), int(total))

    def open(self, opened: OpenedRow) -> None:
        with device_errors(self.device.torch_device):
            self._sampler.open(opened)

    def close(self, row: int) -> None:
        self._sampler.close(row)
        self._finisher.close(row)

    def submit(self, forward_input: ForwardInput) -> CUDAStep:
        with device_errors(self.device.torch_device):
            return self._submit(forward_input)

    def _submit(self, forward_input: ForwardInput) -> CUDAStep:
        if self._pending is not None:
            self._pending.sample()
        wanted = wanted_tokens(forward_input)
        shape = self._shape(forward_input)
        self._send(forward_input, shape, wanted)
        self._run(shape, min(len(wanted.tokens), self._space.arrays.sizes.selected))
        finish, take_in = self._finisher.finish, self._sampler.take_in
        self._pending = CUDAStep(forward_input, wanted, finish, take_in, self.device.torch_device)
        return self._pending

    def _shape(self, step: ForwardInput) -> StepShape:
        """The padded shape that a step runs in."""
        sizes = self._space.arrays.sizes
        tiles = len(tiles_of(step, sizes.tile_tokens))
        decodes = padded_rows(count_decodes(step), sizes.rows)
        if not tiles:
            longest = max([row.num_context_tokens for row in step.rows], default=0)
            return StepShape(decodes, decodes, 0, self._attention.is_long(decodes, longest))
        return self._graphs.padded(StepShape(padded_tokens(len(step.token_ids), sizes.tokens), decodes, tiles))

    def _decode_shapes(self) -> list[StepShape]:
        """Of all steps of decodes alone."""
        counts = row_counts(self._space.arrays.sizes.rows)
        long = [StepShape(rows, rows, 0, True) for rows in counts if self._attention.is_long(rows, self._context)]
        return [StepShape(rows, rows, 0) for rows in counts] + long

    def _send(self, step: ForwardInput, shape: StepShape, wanted: WantedTokens) -> None:
        """Send a step's arrays; a choice becomes its row's next token at once where no drafts must be verified."""
        most, rows = self._space.arrays.sizes.selected, step.rows
        choosing = (rows[index] for index in wanted.rows[: wanted.num_choices])
        numbers = [-1 if row.num_drafts else row.row for row in choosing]
        numbers += [-1] * (len(wanted.tokens) - wanted.num_choices)
        self._space.arrays.send(step, shape, list(zip(wanted.tokens, numbers, strict=True))[:most])

    def _run(self, shape: StepShape, selected: int) -> None:
        self._graphs.run(shape, selected)

    def launches(self, forward_input: ForwardInput) -> list[StepLaunch]:
        """The launches of a step, in order, its arrays on the device already: for a profile. Rows are not sampled."""
        wanted, most = wanted_tokens(forward_input), self._space.arrays.sizes.selected
        shape = self._shape(forward_input)
        self._send(forward_input, shape, wanted)
        selected = padded_rows(min(len(wanted.tokens), most), most)
        return [
            StepLaunch(launch.name, partial(launch.run, of), self._bytes_read(launch, forward_input))
            for launch, of in self._graphs.launches(shape, selected)
        ]

    def _bytes_read(self, launch: Launch, step: ForwardInput) -> int:
        if launch.attention is None:
            return launch.weight_bytes
        return cached_tokens_read(launch.attention, step) * self._kv.token_bytes(launch.attention)

    @property
    def spec(self) -> ModelSpec:
        """The model that is loaded."""
        return self._spec

    @property
    def device(self) -> DeviceProfile:
        """Where the model is."""
        assert self._device is not None
        return self._device

    def stream(self, tokens: int) -> NDArray[np.float32]:
        """The residual stream of the last step's first tokens, as it is now: float32 [tokens, hidden_size]."""
        return self._space.hidden[:tokens].cpu().numpy().copy()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] of some of the last step's tokens, at most as many as the workspace has room for."""
        return self._finisher.logits(tokens)

    def shutdown(self) -> None:
        gpu = self._device.torch_device if self._device is not None and self._device.is_gpu else None
        try:
            with device_errors(gpu):
                if gpu is not None and self._loaded:
                    torch.cuda.synchronize(gpu)
                self._free()
                if gpu is not None:
                    torch.cuda.empty_cache()
        except DeviceLostError as error:
            _LOG.warning("GPU memory is freed only when the process ends: %s", error)

    def _free(self) -> None:
        """Drop all that is on the device, also what a load that failed has left."""
        if "_graphs" in self.__dict__:
            self._graphs.close()
        for name in ("_finisher", "_graphs", "_attention", "_weights", "_space", "_ropes", "_sampler", "_kv"):
            self.__dict__.pop(name, None)
        self._loaded, self._pending = False, None
