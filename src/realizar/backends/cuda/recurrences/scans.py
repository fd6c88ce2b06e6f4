"""Gated delta nets bound to kernels in CUDA C++, on Hopper for the heads that they have, or else chunks to Triton's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from realizar.backends.cuda.device import DeviceProfile, stream_of
from realizar.backends.cuda.kernels.recurrences.delta_inputs import padded
from realizar.backends.cuda.kernels.recurrences.delta_scan import scan_inputs, scan_prepare, scan_states
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.native.compiler import Source, architecture
from realizar.backends.cuda.native.launcher import LoadedKernels
from realizar.backends.cuda.native.scans.source import FACTOR_BYTES, LINK_BYTES, SCAN_HEAD, THREADS, ScanKernels
from realizar.backends.cuda.recurrences.memory import recurrent_layers
from realizar.backends.cuda.recurrences.nets import Net, input_sums, is_exact
from realizar.backends.cuda.recurrences.rows import most_tiles, num_recurring, num_tiles
from realizar.backends.cuda.step_arrays import SCAN_TILE
from realizar.backends.cuda.workspace import Workspace
from realizar.models.mixers import GatedDeltaNet
from realizar.models.spec import ModelSpec

_COLUMNS = 32  # of a head's state, in one program of Triton's `scan_states`
_INPUT_TOKENS = 16  # of a tile, that one program of `scan_inputs` takes
_FEW_ROWS = 32  # up to which Triton's `recur_once` is no slower than the kernel for rows of one token each
_LARGEST = 64.0  # of a head's numbers before their gate, as halves, so that gates up to 1,023 are never cut


@dataclass(frozen=True, slots=True)
class ScannedChunks:
    """What Hopper's kernels read and write, and how many tiles and rows they have, those that are none included.

    Attributes:
        partials: float32 [splits, tokens, width], with `bias`, float32 [width], or None: a net's inputs.
        rings, kernel, decay_bias, rate: float32, as of `Net`.
        recurring, tile_rows, tile_firsts, scanned: int32, as `RecurringRows` fills them.
        scratch: bytes that the kernels hand on: `mixed`, `links` and `factors` of tiles.cu.
        states: float32 [slots, value heads, key size, value size]. output: float32 [tokens, columns].
    """

    partials: torch.Tensor
    bias: torch.Tensor | None
    rings: torch.Tensor
    kernel: torch.Tensor
    decay_bias: torch.Tensor
    rate: torch.Tensor
    recurring: torch.Tensor
    tile_rows: torch.Tensor
    tile_firsts: torch.Tensor
    scanned: torch.Tensor
    scratch: tuple[torch.Tensor, ...]
    states: torch.Tensor
    output: torch.Tensor
    tiles: int
    rows: int


class HopperScan:
    """Starts the kernels of a net's shape."""

    def __init__(self, shape: ScanKernels, loaded: LoadedKernels) -> None:
        self._shape, self._loaded = shape, loaded
        self.sources = shape.sources()

    def launches(
        self, on: ScannedChunks, scale: float, stream: int, dependent: bool
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each kernel's name and start, in order. Raises KernelError where one is compiled now, and does not."""
        shape = self._shape
        sums = [on.partials.shape[0], on.partials.stride(0), on.partials.stride(1)]
        bias = 0 if on.bias is None else on.bias.data_ptr()
        tiles, (mixed, links, factors) = [on.recurring, on.tile_rows, on.tile_firsts], on.scratch
        heads, blocks = 2 * shape.key_heads + shape.value_heads, shape.value_heads * SCAN_HEAD // 64
        of_inputs = [on.partials, bias, on.rings, on.kernel, *tiles, mixed, scale, *sums]
        of_prepare = [on.partials, bias, on.decay_bias, on.rate, *tiles, mixed, links, factors, *sums]
        of_states = [on.recurring, on.scanned, mixed, links, factors, on.states, on.output, on.output.stride(0)]
        for name, grid, arguments, sizes in (
            ("inputs", (heads, on.tiles, 1), of_inputs, "ppppppppfiii"),
            ("prepare", (shape.value_heads, on.tiles, 1), of_prepare, "ppppppppppiii"),
            ("states", (blocks, on.rows, 1), of_states, "pppppppi"),
        ):
            values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
            start = self._loaded[self.sources[name]].launch
            yield name, partial(start, grid, THREADS[name], values, sizes, stream, dependent)


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """What Hopper's kernel for rows of one token each reads and writes; tensors as of `ScannedChunks`.

    Attributes:
        norm, eps: of heads before their gate, float32 [head]. factor: a power of two, by which `gated` is divided.
        gated: the next matmul's input, `half`; None leaves heads in `output`, before norm and gate.
        rows: of the table, that are looked at.
    """

    partials: torch.Tensor
    bias: torch.Tensor | None
    rings: torch.Tensor
    kernel: torch.Tensor
    decay_bias: torch.Tensor
    rate: torch.Tensor
    states: torch.Tensor
    recurring: torch.Tensor
    norm: torch.Tensor
    eps: float
    factor: float
    output: torch.Tensor
    gated: ActivationBuffer | None
    rows: int


class HopperRows:
    """Starts the kernel for rows of one token each of a net's shape, on a card with so many processors."""

    def __init__(self, shape: ScanKernels, loaded: LoadedKernels, processors: int) -> None:
        self._heads, self._loaded, self._processors = shape.value_heads, loaded, processors
        self.source = shape.rows()

    def start(self, on: DecodedRows, scale: float, stream: int, dependent: bool) -> None:
        tensors = on.rings, on.kernel, on.decay_bias, on.rate, on.states, on.recurring, on.norm, on.output
        addresses = [on.partials.data_ptr(), 0 if on.bias is None else on.bias.data_ptr()]
        addresses += [each.data_ptr() for each in tensors]
        halves, block_tokens = ((0, 0), 1) if on.gated is None else (on.gated.addresses, on.gated.format.block_tokens)
        numbers = scale, on.eps, on.factor, on.output.stride(0), block_tokens, on.rows
        sums = on.partials.shape[0], on.partials.stride(0), on.partials.stride(1)
        grid = min(on.rows * self._heads, self._processors), 1, 1
        self._loaded[self.source].launch(
            grid, THREADS["rows"], [*addresses, *halves, *numbers, *sums], "p" * 12 + "fff" + "i" * 6, stream, dependent
        )


class ScanScratch(NamedTuple):
    """What the kernels of a scan hand on, flat, large enough for every layer that they have: none for no layer."""

    triton: tuple[torch.Tensor, ...]
    hopper: tuple[torch.Tensor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (*self.triton, *self.hopper))


class ScanBinder:
    """Chooses and starts the kernels for the scanned rows of a step, in each layer."""

    def __init__(self, workspace: Workspace, device: DeviceProfile, scratch: ScanScratch) -> None:
        self._space, self._device, self._scratch = workspace, device, scratch
        planned = device.torch_device.type == "meta"
        self._loaded = LoadedKernels(architecture(device.capability), planned=planned)
        self._wanted: list[Source] = []
        # tf32 is as exact as a cache of two bytes a number asks for: 1e-3 of a layer's output.
        precision = "tf32x3" if is_exact(workspace) else "tf32"
        self._options: dict[str, Any] = {"PRECISION": precision, "num_warps": 4, "num_stages": 1}

    def bind(self, net: Net) -> Callable[[StepKind], None]:
        """Return a function that starts a layer's kernels, in steps with tiles."""
        if not _on_hopper(net.part, self._space, self._device):
            return partial(self._start_triton, net)
        scan = HopperScan(_shape(net), self._loaded)
        self._wanted += scan.sources.values()
        return partial(self._start_hopper, net, scan)

    def bind_rows(self, net: Net) -> RowsBinder | None:
        """What starts a layer's kernel in steps of one token a row; None where Hopper has none."""
        if not _has_rows(net.part, self._device):
            return None
        rows = HopperRows(_shape(net), self._loaded, self._device.processors)
        self._wanted.append(rows.source)
        return RowsBinder(net, rows, self._space)

    def prepare(self) -> None:
        """Compile and load the layers' kernels; KernelError where one does not compile, or the device refuses it."""
        self._loaded.prepare(self._wanted)

    def _start_hopper(self, net: Net, scan: HopperScan, kind: StepKind) -> None:
        space, arrays = self._space, self._space.arrays
        if not (tiles := num_tiles(kind, arrays.sizes)):
            return
        partials = space.partials(net.linear.splits(kind), kind.tokens, net.linear.width)
        chunks = ScannedChunks(
            partials, net.linear.bias, net.rings, net.kernel, net.decay_bias, net.rate, arrays["recurring"],
            arrays["scan_rows"], arrays["scan_firsts"], arrays["scanned"], self._scratch.hopper, net.states,
            space.attended, tiles, num_recurring(kind, arrays.sizes),
        )  # fmt: skip
        dependent = space.launching(kind)["DEPENDENT"]
        for _, start in scan.launches(chunks, net.scale, _stream(space), dependent):
            start()

    def _start_triton(self, net: Net, kind: StepKind) -> None:
        count = num_tiles(kind, self._space.arrays.sizes)
        if not count:
            return
        part, arrays, attended = net.part, self._space.arrays, self._space.attended
        columns = min(_COLUMNS, padded(part.value_size))
        inputs = {name: size for name, size in net.sizes.items() if name != "TILED"}
        heads_of = {name: inputs[name] for name in ("KEY_HEADS", "VALUE_HEADS", "KEY", "VALUE")}
        sums, constants = input_sums(self._space, net.linear, kind)
        table, tiles = arrays["recurring"], (arrays["scan_rows"], arrays["scan_firsts"])
        scratch = self._scratch.triton
        heads = 2 * part.num_key_heads + part.num_value_heads
        scan_inputs[(count, heads, SCAN_TILE // _INPUT_TOKENS)](
            *sums, net.rings, net.kernel, table, *tiles, scratch[0], net.scale, TOKENS=_INPUT_TOKENS, **inputs,
            **constants,
        )  # fmt: skip
        scan_prepare[(count, part.num_value_heads)](
            *sums, net.decay_bias, net.rate, table, *tiles, *scratch, TILED=part.tiled, **heads_of, **constants,
            **self._options,
        )  # fmt: skip
        rows = num_recurring(kind, arrays.sizes)
        scan_states[(rows, part.num_value_heads, -(-part.value_size // columns))](
            table, arrays["scanned"], *scratch[1:], net.states, attended, attended.stride(0),
            VALUE_HEADS=part.num_value_heads, KEY=part.key_size, VALUE=part.value_size, BLOCK=columns,
            **self._space.launching(kind), **self._options,
        )  # fmt: skip


class RowsBinder:
    """Starts the kernel for rows of one token each in a layer."""

    def __init__(self, net: Net, rows: HopperRows, space: Workspace) -> None:
        self._net, self._rows, self._space = net, rows, space

    @cached_property
    def _factor(self) -> float:
        if self._net.norm.is_meta:
            return 1.0
        # Heads over their root mean square have no number above the root of their size.
        largest = float(self._net.norm.abs().max()) * SCAN_HEAD**0.5
        return 2.0 ** math.ceil(math.log2(largest / _LARGEST)) if largest > 0.0 else 1.0

    def runs(self, kind: StepKind) -> bool:
        return not kind.tiles and kind.tokens > _FEW_ROWS

    def target(self, kind: StepKind) -> ActivationBuffer | None:
        """The next matmul's input, where it is one that the kernel writes; None leaves heads to `gate_heads`."""
        formats, part = self._net.consumer.input_formats(kind), self._net.part
        if len(formats) > 1 or formats[0].kind != "half":
            return None
        return self._space.activations.get(formats[0], part.num_value_heads * part.value_size)

    def start(self, kind: StepKind) -> None:
        net, space = self._net, self._space
        partials = space.partials(net.linear.splits(kind), kind.tokens, net.linear.width)
        decoded = DecodedRows(
            partials, net.linear.bias, net.rings, net.kernel, net.decay_bias, net.rate, net.states,
            space.arrays["recurring"], net.norm, net.eps, self._factor, space.attended, self.target(kind),
            num_recurring(kind, space.arrays.sizes),
        )  # fmt: skip
        self._rows.start(decoded, net.scale, _stream(space), space.launching(kind)["DEPENDENT"])


def _stream(space: Workspace) -> int:
    return stream_of(space.hidden.device)


def _shape(net: Net) -> ScanKernels:
    part = net.part
    return ScanKernels(part.num_key_heads, part.num_value_heads, part.length, net.sizes["RING"], part.tiled)


def _has_rows(net: GatedDeltaNet, device: DeviceProfile) -> bool:
    hopper = device.capability == (9, 0) and device.runs("scans")
    return hopper and net.key_size == net.value_size == SCAN_HEAD


def _on_hopper(net: GatedDeltaNet, space: Workspace, device: DeviceProfile) -> bool:
    """True where CUDA C++ scans; its kernels read inputs by fours, of which no odd number of value heads has whole."""
    return _has_rows(net, device) and not is_exact(space) and net.num_value_heads % 2 == 0


def scan_scratch(spec: ModelSpec, space: Workspace, device: DeviceProfile) -> ScanScratch:
    nets = [mixer for mixer in recurrent_layers(spec).values() if isinstance(mixer, GatedDeltaNet)]
    hopper = [net for net in nets if _on_hopper(net, space, device)]
    return ScanScratch(
        _triton_scratch([net for net in nets if net not in hopper], space), _hopper_scratch(hopper, space)
    )


def _triton_scratch(nets: Sequence[GatedDeltaNet], space: Workspace) -> tuple[torch.Tensor, ...]:
    """Arrays that `scan_prepare` hands to `scan_states`.

    Queries, keys and what links them are float16 where products are of tf32: of numbers up to one it has as many
    digits, and half as many bytes are waited for.
    """
    if not nets:
        return ()
    tokens, where = space.arrays.sizes.tokens, space.hidden.device
    keys = max(net.num_value_heads * net.key_size for net in nets)
    values = max(net.num_value_heads * net.value_size for net in nets)
    heads = max(net.num_value_heads for net in nets)
    channels = max(net.channels for net in nets)
    short = torch.float32 if is_exact(space) else torch.float16
    kept = (keys, short), (keys, short), (keys, short), (heads * SCAN_TILE, short)
    sizes = (channels, torch.float32), (values, torch.float32), *kept, (heads, torch.float32)
    return tuple(torch.zeros(tokens * size, dtype=dtype, device=where) for size, dtype in sizes)


def _hopper_scratch(nets: Sequence[GatedDeltaNet], space: Workspace) -> tuple[torch.Tensor, ...]:
    if not nets:
        return ()
    tiles, heads = most_tiles(space.arrays.sizes), max(net.num_value_heads for net in nets)
    mixed = max(net.channels for net in nets) * SCAN_TILE * 2
    sizes = mixed, heads * LINK_BYTES, heads * FACTOR_BYTES
    return tuple(torch.zeros(tiles * size, dtype=torch.uint8, device=space.hidden.device) for size in sizes)
