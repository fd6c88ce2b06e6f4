"""Gated delta nets and short convolutions, bound to kernels and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from realizar.backends.cuda.attention.output_gate import start_gate
from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, width_in_blocks
from realizar.backends.cuda.kernels.gate_heads import keep_inputs, norm_heads
from realizar.backends.cuda.kernels.recurrences.delta_decode import recur_once
from realizar.backends.cuda.kernels.recurrences.delta_inputs import padded
from realizar.backends.cuda.kernels.recurrences.delta_net import recur
from realizar.backends.cuda.kernels.recurrences.delta_scan import scan_inputs, scan_prepare, scan_states
from realizar.backends.cuda.kernels.recurrences.short_convolution import convolve, keep_gated
from realizar.backends.cuda.kernels.store_inputs import NOTHING
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.inputs import CHUNK, ActivationBuffer
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.recurrences.memory import StateMemory, recurrent_layers, ring_width
from realizar.backends.cuda.recurrences.rows import num_recurring, num_tiles
from realizar.backends.cuda.step_arrays import SCAN_TILE
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import GatedDeltaNetBlock, ShortConvolutionBlock
from realizar.models.mixers import GatedDeltaNet
from realizar.models.spec import ModelSpec

_COLUMNS, _WARPS = 64, 2  # of a head's state, in one program of `recur`: measured, of 8 to 128 and 1 to 8 the fastest
_FEW_ROWS = 16  # whose heads go through norm and gate in `recur_once`, each a program; of 1 to 8 measured the fastest
_FEW_WARPS = 4
_SCANNED_COLUMNS = 32  # in one of `scan_states`
_KEPT = 256  # columns that one program copies to a ring
_INPUT_TOKENS = 16  # of a tile, that one program of `scan_inputs` takes


@dataclass(frozen=True, slots=True)
class _Net:
    """A gated delta net with its matmuls: `linear` computes its inputs, `consumer` reads the result.

    Attributes:
        kernel, decay_bias, rate, norm: vectors, float32, `rate` below zero.
        rings, states: of its layer. sizes: constants of its kernels.
    """

    part: GatedDeltaNet
    linear: MergedLinear
    consumer: MergedLinear
    kernel: torch.Tensor
    decay_bias: torch.Tensor
    rate: torch.Tensor
    norm: torch.Tensor
    rings: torch.Tensor
    states: torch.Tensor
    sizes: dict[str, Any]

    @property
    def scale(self) -> float:
        return float(self.part.key_size**-0.5)

    @property
    def eps(self) -> float:
        return float(self.part.norm.eps)


class RecurrenceBinder:
    """Binds the operations between a recurrence's input matmuls and its output projection.

    With `scratch`, of `scan_scratch`, chunks go through matrix units; without they go token by token, with one order of
    sums.
    """

    def __init__(
        self, weights: Weights, workspace: Workspace, memory: StateMemory, scratch: tuple[torch.Tensor, ...]
    ) -> None:
        self._weights, self._space, self._memory, self._scratch = weights, workspace, memory, scratch
        self._none = torch.zeros(1, device=workspace.hidden.device)
        # tf32 is as exact as a cache of two bytes a number asks for: 1e-3 of a layer's output.
        precision = "tf32x3" if _is_exact(workspace) else "tf32"
        self._options: dict[str, Any] = {"PRECISION": precision, "num_warps": 4, "num_stages": 1}

    def bind(
        self, block: GatedDeltaNetBlock | ShortConvolutionBlock, linear: MergedLinear, consumer: MergedLinear
    ) -> Iterator[Launch]:
        """The launches of one block: `linear` computes its inputs, `consumer` reads the result."""
        if isinstance(block, ShortConvolutionBlock):
            yield Launch("convolution", self._convolve(block, linear, consumer))
            yield Launch("convolution state", partial(self._keep_gated, block, linear))
            return
        net = self._net(block, linear, consumer)
        yield Launch("recurrence", partial(self._recur, net))
        if self._scratch:
            yield Launch("recurrence", partial(self._scan, net))
        yield Launch("recurrence output", partial(self._gate, net))
        yield Launch("recurrence inputs", partial(self._keep_inputs, net))

    def _net(self, block: GatedDeltaNetBlock, linear: MergedLinear, consumer: MergedLinear) -> _Net:
        part, memory = block.recurrence, self._memory
        rate = self._weights.vector(part.rate)
        sizes = {
            "KEY_HEADS": part.num_key_heads, "VALUE_HEADS": part.num_value_heads, "KEY": part.key_size,
            "VALUE": part.value_size, "LENGTH": part.length, "RING": memory.ring, "WIDTH": ring_width(part),
            "TILED": part.tiled,
        }  # fmt: skip
        return _Net(
            part, linear, consumer, self._weights.matrix(part.kernel), self._weights.vector(part.decay_bias),
            -torch.exp(rate) if part.rate_is_log else rate, self._weights.norm_weight(part.norm),
            memory.rings[block.layer], memory.states[block.layer], sizes,
        )  # fmt: skip

    def _sums(self, linear: MergedLinear, kind: StepKind) -> tuple[tuple[Any, ...], dict[str, Any]]:
        splits = linear.splits(kind)
        partials = self._space.partials(splits, kind.tokens, linear.width)
        bias = self._none if linear.bias is None else linear.bias
        constants = {"SPLITS": splits, "BIAS": linear.bias is not None, **self._space.launching(kind)}
        return (partials, partials.stride(0), partials.stride(1), bias), constants

    def _is_once(self, kind: StepKind) -> bool:
        """True where `recur_once` runs: each row has one token, and sums may have an order of their own."""
        return bool(self._scratch) and not kind.tiles

    def _gated_target(self, net: _Net, kind: StepKind) -> ActivationBuffer | None:
        """The activations that `recur_once` writes for the next matmul; None where it leaves heads to `gate_heads`."""
        part, formats = net.part, net.consumer.input_formats(kind)
        columns, _ = _once_cut(kind, part.value_size)
        if columns < part.value_size or part.value_size % CHUNK or len(formats) > 1 or formats[0].kind == "fp8":
            return None
        return self._space.activations.get(formats[0], part.num_value_heads * part.value_size)

    def _recur(self, net: _Net, kind: StepKind) -> None:
        space, part, once = self._space, net.part, self._is_once(kind)
        sums, constants = self._sums(net.linear, kind)
        columns, warps = _once_cut(kind, part.value_size) if once else (min(_COLUMNS, padded(part.value_size)), _WARPS)
        grid = num_recurring(kind, space.arrays.sizes), part.num_value_heads, -(-part.value_size // columns)
        arguments = (
            *sums, net.rings, net.kernel, net.decay_bias, net.rate, net.states, space.arrays["recurring"],
            space.attended, space.attended.stride(0), net.scale,
        )  # fmt: skip
        constants |= {**net.sizes, "BLOCK": columns, "num_warps": warps}
        if not once:
            recur[grid](*arguments, **constants)
            return
        target, none = self._gated_target(net, kind), self._none
        pointers = (none, 0, none, none, none) if target is None else target.pointers()
        nothing = {"FORMAT": NOTHING.value, "BLOCK_TOKENS": 1, "CHUNKS": 1}
        recur_once[grid](
            *arguments, net.norm, net.eps, *pointers, *space.token_state, GATED=target is not None,
            **constants, **(nothing if target is None else target.constants()),
        )  # fmt: skip

    def _scan(self, net: _Net, kind: StepKind) -> None:
        if not kind.tiles:
            return
        part, arrays, attended = net.part, self._space.arrays, self._space.attended
        columns = min(_SCANNED_COLUMNS, padded(part.value_size))
        inputs = {name: size for name, size in net.sizes.items() if name != "TILED"}
        heads_of = {name: inputs[name] for name in ("KEY_HEADS", "VALUE_HEADS", "KEY", "VALUE")}
        sums, constants = self._sums(net.linear, kind)
        table, tiles = arrays["recurring"], (arrays["scan_rows"], arrays["scan_firsts"])
        count, mixed = num_tiles(kind, arrays.sizes), self._scratch[0]
        heads = 2 * part.num_key_heads + part.num_value_heads
        scan_inputs[(count, heads, SCAN_TILE // _INPUT_TOKENS)](
            *sums, net.rings, net.kernel, table, *tiles, mixed, net.scale, TOKENS=_INPUT_TOKENS, **inputs, **constants
        )
        scan_prepare[(count, part.num_value_heads)](
            *sums, net.decay_bias, net.rate, table, *tiles, *self._scratch, TILED=part.tiled, **heads_of, **constants,
            **self._options,
        )  # fmt: skip
        rows = num_recurring(kind, arrays.sizes)
        scan_states[(rows, part.num_value_heads, -(-part.value_size // columns))](
            table, arrays["scanned"], *self._scratch[1:], net.states, attended, attended.stride(0),
            VALUE_HEADS=part.num_value_heads, KEY=part.key_size, VALUE=part.value_size, BLOCK=columns,
            **self._space.launching(kind), **self._options,
        )  # fmt: skip

    def _gate(self, net: _Net, kind: StepKind) -> None:
        if self._is_once(kind) and self._gated_target(net, kind) is not None:
            return
        space, part, size, norm = self._space, net.part, net.part.value_size, (net.norm, net.eps)
        if size == padded(size):
            start_gate(space, kind, net.linear, part.channels, size, net.consumer, norm)
            return
        norm_heads[(kind.tokens, part.num_value_heads)](
            space.attended, space.attended.stride(0), *norm, HEAD=size, **space.launching(kind)
        )
        start_gate(space, kind, net.linear, part.channels, size, net.consumer, activation=ACTIVATIONS["silu"])

    def _keep_inputs(self, net: _Net, kind: StepKind) -> None:
        if self._is_once(kind):
            return
        part, width = net.part, ring_width(net.part)
        sums, constants = self._sums(net.linear, kind)
        keep_inputs[(kind.tokens, -(-width // _KEPT))](
            *sums, self._space.arrays["ring_slots"], net.rings, part.channels, part.num_value_heads * part.value_size,
            WIDTH=width, BLOCK=_KEPT, **constants,
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
            sums, constants = self._sums(linear, kind)
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
        sums, constants = self._sums(linear, kind)
        keep_gated[(kind.tokens, -(-width // _KEPT))](
            *sums, self._space.arrays["ring_slots"], rings, width, BLOCK=_KEPT, **constants
        )


def _once_cut(kind: StepKind, value_size: int) -> tuple[int, int]:
    whole = padded(value_size)
    return (whole, _FEW_WARPS) if kind.tokens <= _FEW_ROWS else (min(_COLUMNS, whole), _WARPS)


def scan_scratch(spec: ModelSpec, space: Workspace) -> tuple[torch.Tensor, ...]:
    """The arrays that `scan_prepare` hands to `scan_states`, large enough for every layer; flat.

    Queries, keys and what links them are float16 where products are of tf32: of numbers up to one it has as many
    digits, and half as many bytes are waited for.
    """
    nets = [mixer for mixer in recurrent_layers(spec).values() if isinstance(mixer, GatedDeltaNet)]
    if not nets:
        return ()
    tokens, where = space.arrays.sizes.tokens, space.hidden.device
    keys = max(net.num_value_heads * net.key_size for net in nets)
    values = max(net.num_value_heads * net.value_size for net in nets)
    heads = max(net.num_value_heads for net in nets)
    channels = max(net.channels for net in nets)
    short = torch.float32 if _is_exact(space) else torch.float16
    kept = (keys, short), (keys, short), (keys, short), (heads * SCAN_TILE, short)
    sizes = (channels, torch.float32), (values, torch.float32), *kept, (heads, torch.float32)
    return tuple(torch.zeros(tokens * size, dtype=dtype, device=where) for size, dtype in sizes)


def _is_exact(space: Workspace) -> bool:
    """True if a cache of float32 asks for its digits in chunks too."""
    return space.query.dtype == torch.float32
