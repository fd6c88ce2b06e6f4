"""Gated delta nets and short convolutions, bound to kernels and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from realizar.backends.cuda.attention.output_gate import start_gate
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, width_in_blocks
from realizar.backends.cuda.kernels.gate_heads import keep_inputs, norm_heads
from realizar.backends.cuda.kernels.recurrences.delta_decode import recur_once
from realizar.backends.cuda.kernels.recurrences.delta_inputs import padded
from realizar.backends.cuda.kernels.recurrences.delta_net import recur
from realizar.backends.cuda.kernels.recurrences.short_convolution import convolve, keep_gated
from realizar.backends.cuda.kernels.store_inputs import NOTHING
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.inputs import CHUNK, ActivationBuffer
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.recurrences.memory import StateMemory, ring_width
from realizar.backends.cuda.recurrences.nets import Net, input_sums
from realizar.backends.cuda.recurrences.rows import num_recurring
from realizar.backends.cuda.recurrences.scans import RowsBinder, ScanBinder, ScanScratch
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import GatedDeltaNetBlock, ShortConvolutionBlock

_COLUMNS, _WARPS = 64, 2  # of a head's state, in one program of `recur`: measured, of 8 to 128 and 1 to 8 the fastest
_FEW_ROWS = 16  # whose heads go through norm and gate in `recur_once`, each a program; of 1 to 8 measured the fastest
_FEW_WARPS = 4
_KEPT = 256  # columns that one program copies to a ring
_KEPT_TOKENS = 16  # of a step with chunks, whose number they divide, that it looks through for those that are kept


class RecurrenceBinder:
    """Binds the operations between a recurrence's input matmuls and its output projection.

    With `scratch`, of `scan_scratch`, chunks go through matrix units; without they go token by token, with one order of
    sums.
    """

    def __init__(
        self, weights: Weights, workspace: Workspace, memory: StateMemory, device: DeviceProfile,
        scratch: ScanScratch | None,
    ) -> None:  # fmt: skip
        self._weights, self._space, self._memory = weights, workspace, memory
        self._none = torch.zeros(1, device=workspace.hidden.device)
        self._scans = None if scratch is None else ScanBinder(workspace, device, scratch)

    def prepare(self) -> None:
        """Compile and load the layers' kernels; KernelError where one does not compile, or the device refuses it."""
        if self._scans is not None:
            self._scans.prepare()

    def bind(
        self, block: GatedDeltaNetBlock | ShortConvolutionBlock, linear: MergedLinear, consumer: MergedLinear
    ) -> Iterator[Launch]:
        """The launches of one block: `linear` computes its inputs, `consumer` reads the result."""
        if isinstance(block, ShortConvolutionBlock):
            yield Launch("convolution", self._convolve(block, linear, consumer))
            yield Launch("convolution state", partial(self._keep_gated, block, linear))
            return
        net = self._net(block, linear, consumer)
        rows = None if self._scans is None else self._scans.bind_rows(net)
        yield Launch("recurrence", partial(self._recur, net, rows))
        if self._scans is not None:
            yield Launch("recurrence", self._scans.bind(net))
        yield Launch("recurrence output", partial(self._gate, net, rows))
        yield Launch("recurrence inputs", partial(self._keep_inputs, net))

    def _net(self, block: GatedDeltaNetBlock, linear: MergedLinear, consumer: MergedLinear) -> Net:
        part, memory = block.recurrence, self._memory
        rate = self._weights.vector(part.rate)
        if part.rate_is_log and not rate.is_meta:  # there torch would import its compiler for it, which takes seconds
            rate = -torch.exp(rate)
        sizes = {
            "KEY_HEADS": part.num_key_heads, "VALUE_HEADS": part.num_value_heads, "KEY": part.key_size,
            "VALUE": part.value_size, "LENGTH": part.length, "RING": memory.ring, "WIDTH": ring_width(part),
            "TILED": part.tiled,
        }  # fmt: skip
        return Net(
            part, linear, consumer, self._weights.matrix(part.kernel), self._weights.vector(part.decay_bias),
            rate, self._weights.norm_weight(part.norm), memory.rings[block.layer], memory.states[block.layer], sizes,
        )  # fmt: skip

    def _is_once(self, kind: StepKind) -> bool:
        """True where `recur_once` runs: each row has one token, and sums may have an order of their own."""
        return self._scans is not None and not kind.tiles

    def _gated_target(self, net: Net, rows: RowsBinder | None, kind: StepKind) -> ActivationBuffer | None:
        """The next matmul's activations, that the recurrence writes; None where it leaves heads to `gate_heads`."""
        if rows is not None and rows.runs(kind):
            return rows.target(kind)
        part, formats = net.part, net.consumer.input_formats(kind)
        columns, _ = _once_cut(kind, part.value_size)
        if columns < part.value_size or part.value_size % CHUNK or len(formats) > 1 or formats[0].kind == "fp8":
            return None
        return self._space.activations.get(formats[0], part.num_value_heads * part.value_size)

    def _recur(self, net: Net, rows: RowsBinder | None, kind: StepKind) -> None:
        if rows is not None and rows.runs(kind):
            rows.start(kind)
            return
        space, part, once = self._space, net.part, self._is_once(kind)
        sums, constants = input_sums(self._space, net.linear, kind)
        columns, warps = _once_cut(kind, part.value_size) if once else (min(_COLUMNS, padded(part.value_size)), _WARPS)
        count, blocks = num_recurring(kind, space.arrays.sizes), -(-part.value_size // columns)
        arguments = (
            *sums, net.rings, net.kernel, net.decay_bias, net.rate, net.states, space.arrays["recurring"],
            space.attended, space.attended.stride(0), net.scale,
        )  # fmt: skip
        constants |= {**net.sizes, "BLOCK": columns, "num_warps": warps}
        if not once:
            recur[(part.num_value_heads, blocks, count)](*arguments, **constants)
            return
        target, none = self._gated_target(net, rows, kind), self._none
        pointers = (none, 0, none, none, none) if target is None else target.pointers()
        nothing = {"FORMAT": NOTHING.value, "BLOCK_TOKENS": 1, "CHUNKS": 1}
        recur_once[(count, part.num_value_heads, blocks)](
            *arguments, net.norm, net.eps, *pointers, *space.token_state, GATED=target is not None,
            **constants, **(nothing if target is None else target.constants()),
        )  # fmt: skip

    def _gate(self, net: Net, rows: RowsBinder | None, kind: StepKind) -> None:
        if self._is_once(kind) and self._gated_target(net, rows, kind) is not None:
            return
        space, part, size, norm = self._space, net.part, net.part.value_size, (net.norm, net.eps)
        if size == padded(size):
            start_gate(space, kind, net.linear, part.channels, size, net.consumer, norm)
            return
        norm_heads[(kind.tokens, part.num_value_heads)](
            space.attended, space.attended.stride(0), *norm, HEAD=size, **space.launching(kind)
        )
        start_gate(space, kind, net.linear, part.channels, size, net.consumer, activation=ACTIVATIONS["silu"])

    def _keep_inputs(self, net: Net, kind: StepKind) -> None:
        if self._is_once(kind):
            return
        part, width = net.part, ring_width(net.part)
        sums, constants = input_sums(self._space, net.linear, kind)
        tokens = _kept_tokens(kind)
        keep_inputs[(kind.tokens // tokens, -(-width // _KEPT))](
            *sums, self._space.arrays["ring_slots"], net.rings, part.channels, part.num_value_heads * part.value_size,
            WIDTH=width, TOKENS=tokens, BLOCK=_KEPT, **constants,
        )  # fmt: skip

    def _convolve(
        self, block: ShortConvolutionBlock, linear: MergedLinear, consumer: MergedLinear
    ) -> Callable[[StepKind], None]:
        part, space = block.convolution, self._space
        arrays, rings, ring = space.arrays, self._memory.rings[block.layer], self._memory.ring
        kernel = self._weights.matrix(part.kernel)
        bias = self._none if part.bias is None else self._weights.vector(part.bias)
        width = part.channels

        def run(kind: StepKind) -> None:
            sums, constants = input_sums(self._space, linear, kind)
            for input_format in consumer.input_formats(kind):
                target = space.activations.get(input_format, width)
                cut = width_in_blocks(width)
                convolve[(kind.tokens, cut.blocks)](
                    *sums, rings, arrays["token_slots"], arrays["token_offsets"], arrays["positions"], kernel, bias,
                    width, *target.pointers(), *space.token_state, KERNEL_BIAS=part.bias is not None,
                    LENGTH=part.length, RING=ring, BLOCK=cut.block, num_warps=cut.warps, **target.constants(),
                    **constants,
                )  # fmt: skip

        return run

    def _keep_gated(self, block: ShortConvolutionBlock, linear: MergedLinear, kind: StepKind) -> None:
        width, rings = block.convolution.channels, self._memory.rings[block.layer]
        sums, constants = input_sums(self._space, linear, kind)
        tokens = _kept_tokens(kind)
        keep_gated[(kind.tokens // tokens, -(-width // _KEPT))](
            *sums, self._space.arrays["ring_slots"], rings, width, TOKENS=tokens, BLOCK=_KEPT, **constants
        )


def _once_cut(kind: StepKind, value_size: int) -> tuple[int, int]:
    whole = padded(value_size)
    return (whole, _FEW_WARPS) if kind.tokens <= _FEW_ROWS else (min(_COLUMNS, whole), _WARPS)


def _kept_tokens(kind: StepKind) -> int:
    return 1 if kind.tokens % _KEPT_TOKENS else _KEPT_TOKENS
