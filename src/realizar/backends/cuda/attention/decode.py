"""Attention of single tokens bound to its kernel: CUDA C++, or Triton where that has none of a kind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import triton

from realizar.backends.cuda.attention.arguments import AttentionArguments
from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.device import DeviceProfile, stream_of
from realizar.backends.cuda.kernel_sizes import decode_parts, padded_head, shared_heads
from realizar.backends.cuda.kernels.attend_decode import attend_decode
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.inputs import InputFormat
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.native.attend_source import AttendKernel
from realizar.backends.cuda.native.compiler import architecture, begin_compiling, compile_sources
from realizar.backends.cuda.native.launcher import Kernel, PlannedKernel
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import AttentionBlock, SharedAttentionBlock
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention

_SHORT = 2048  # tokens of a context that is not cut into more parts than pay
_STATIC_BYTES = 8 << 10  # shared memory of a block of attention beside its tiles, about
_FLOAT_TOKENS = {"FORMAT": 0, "BLOCK_TOKENS": 1, "CHUNKS": 1}


@dataclass(frozen=True, slots=True)
class BoundDecode:
    """One layer's attention: `linear` computes what is its own of queries, keys and values; `consumer` reads the
    result.
    """

    block: AttentionBlock | SharedAttentionBlock
    linear: MergedLinear
    consumer: MergedLinear


class DecodeBinder:
    """Chooses and starts the kernel for the single tokens of a step, in each layer."""

    def __init__(
        self, arguments: AttentionArguments, workspace: Workspace, kv: KVMemory, device: DeviceProfile,
        context_length: int,
    ) -> None:  # fmt: skip
        self._arguments, self._space, self._kv = arguments, workspace, kv
        self._device, self._context = device, context_length
        self._native = DecodeAttention(device.torch_device, device.capability) if device.runs("attention") else None
        self._bound: dict[Hashable, BoundDecode] = {}  # one of each kind for which the same kernels are chosen

    def bind(self, decode: BoundDecode) -> Callable[[StepKind], None]:
        """Return a function that starts a layer's kernel, for steps with decodes."""
        attention, linear, consumer = decode.block.attention, decode.linear, decode.consumer
        constants = self._arguments.rotated_constants(attention, linear, StepKind(1, 1))
        others = attention.soft_cap is not None, attention.gate is not None, attention.window
        self._bound[tuple(constants.items()), others, linear.chosen_by, consumer.chosen_by] = decode

        def run(kind: StepKind) -> None:
            if self._native is not None and self._native.ready(kernel := self._kernel(decode, kind)):
                self._start_native(self._native, kernel, decode, kind)
            else:
                self._start_triton(decode, kind)

        return run

    def prepare(self, kinds: Iterable[StepKind]) -> None:
        if self._native is not None:
            steps = [kind for kind in kinds if kind.decodes]
            self._native.prepare(self._kernel(decode, kind) for decode in self._bound.values() for kind in steps)

    def kernels_of(self, kind: StepKind) -> object:
        """A key that is equal for steps whose decodes start the same kernels, with the same compile-time constants."""
        return tuple(self._kernels_of(decode, kind) for decode in self._bound.values()) if kind.decodes else None

    def _kernels_of(self, decode: BoundDecode, kind: StepKind) -> object:
        if self._native is not None and self._native.ready(kernel := self._kernel(decode, kind)):
            return kernel
        attention = decode.block.attention
        rotated = self._arguments.rotated_constants(decode.block.attention, decode.linear, kind)
        target = self._arguments.direct(attention, decode.consumer, kind)
        constants = _FLOAT_TOKENS if target is None else target.constants()
        return self._parts(attention, kind), tuple(rotated.items()), tuple(constants.items())

    def is_long(self, decodes: int, context: int) -> bool:
        if self._native is None or context <= _SHORT:
            return False
        return any(
            _are_few(decodes, decode.block.attention.num_kv_heads, self._device) for decode in self._bound.values()
        )

    def _parts(self, attention: Attention | SharedAttention, kind: StepKind) -> int:
        return decode_parts(attention, kind.decodes, self._context, self._device)

    def _kernel(self, decode: BoundDecode, kind: StepKind) -> AttendKernel:
        attention = decode.block.attention
        rotated = self._arguments.rotated_constants(decode.block.attention, decode.linear, kind)
        target = self._arguments.direct(attention, decode.consumer, kind)
        output = target.format if target is not None and target.format.kind in ("int8", "half") else InputFormat("f32")
        kernel = AttendKernel(
            head=attention.head_size, group=attention.num_heads // attention.num_kv_heads, splits=rotated["SPLITS"],
            bias=rotated["BIAS"], norm=rotated["NORM"], norm_bias=rotated["NORM_BIAS"], rotary=rotated["ROTARY"],
            interleaved=rotated["INTERLEAVED"], element=self._kv.dtype, block_size=self._kv.block_size, out=output.kind,
            block_tokens=output.block_tokens, cap=attention.soft_cap is not None,
            value_norm=rotated["VALUE_NORM"], growth=rotated["GROWTH"], stored=rotated["STORED"],
        )  # fmt: skip
        return sized(kernel, kind, attention.num_kv_heads, self._device)

    def _start_native(self, native: DecodeAttention, kernel: AttendKernel, decode: BoundDecode, kind: StepKind) -> None:
        attention, space, layer = decode.block.attention, self._space, decode.block.cache_layer
        arrays = space.arrays
        target = self._arguments.direct(attention, decode.consumer, kind)
        if target is None:
            written, stride = [space.attended, None, None], space.attended.stride(0)
        else:
            values = target.codes if kernel.out == "int8" else target.values
            written, stride = [values, target.scales, target.terms], target.cols
        pointers = self._arguments.rotated(decode.block.attention, decode.linear, kind)
        (partials, *strides), (bias, _, *vectors), (*eps, key_at, value_at) = (
            pointers[:3],
            pointers[3:-4],
            pointers[-4:],
        )
        tensors = [
            partials, bias, *vectors, *self._arguments.cache(layer), arrays.slots(self._kv.group_of(layer)),
            self._arguments.sinks(attention) if attention.sinks else None,
            space.attention_parts, space.attention_state, space.arrivals, arrays["decodes"], arrays["tables"],
            arrays["header"], *written,
        ]  # fmt: skip
        numbers = [*eps, float(attention.scale), float(attention.soft_cap or 0.0)]
        integers = [
            *strides, key_at, value_at, attention.num_kv_heads, attention.window or 0,
            self._kv.group_of(layer) * arrays.sizes.rows, stride,
        ]  # fmt: skip
        blocks = kind.decodes * attention.num_kv_heads
        room = kernel.resident // kernel.warps * self._device.processors
        parts = self._parts(attention, kind)
        grid = attention.num_kv_heads, kind.decodes, max(1, min(parts, room // blocks))
        native.launch(kernel, grid, tensors, numbers, integers, space.launching(kind)["DEPENDENT"])

    def _start_triton(self, decode: BoundDecode, kind: StepKind) -> None:
        attention, space = decode.block.attention, self._space
        arrays, parts = space.arrays, self._parts(attention, kind)
        target = self._arguments.direct(attention, decode.consumer, kind)
        if target is None:
            written, output = (space.attended, space.attended.stride(0), *[self._arguments.none] * 3), _FLOAT_TOKENS
        else:
            written, output = target.pointers(), target.constants()
        rotated = decode.block.attention, decode.linear, kind
        pointers, constants = self._arguments.rotated(*rotated), self._arguments.rotated_constants(*rotated)
        group, layer = attention.num_heads // attention.num_kv_heads, decode.block.cache_layer
        attend_decode[(kind.decodes, attention.num_kv_heads, parts)](
            *pointers, *self._arguments.cache(layer), arrays.slots(self._kv.group_of(layer)),
            self._arguments.sinks(attention), space.attention_parts, space.attention_state, space.arrivals,
            arrays["decodes"], arrays["tables"], arrays["header"],
            float(attention.scale), float(attention.soft_cap or 1.0), *written, INT8_CACHE=self._kv.dtype == "int8",
            SHARED=shared_heads(attention), PARTS=parts,
            COMBINED=triton.next_power_of_2(group) * padded_head(attention),
            **constants, **self._arguments.shared(decode.block), **output, **space.launching(kind),
        )  # fmt: skip


def sized(kernel: AttendKernel, kind: StepKind, kv_heads: int, device: DeviceProfile) -> AttendKernel:
    """The kernel with warps per block and per multiprocessor: few blocks should end soon, many should fit at once."""
    blocks, processors = kind.decodes * kv_heads, device.processors
    long, few = kind.long, _are_few(kind.decodes, kv_heads, device)
    if long or few:
        warps, resident = 8 if _fits(replace(kernel, warps=8), 2 if long else 1, device) else 4, 16
    else:
        warps, resident = (4, 12) if blocks <= processors else (4, 16) if blocks <= 4 * processors else (2, 16)
    runs = 1 if long or kernel.coded else 4  # there more copies cost more than bank conflicts
    bulk = long or kernel.coded  # the others are 3 % faster by lanes, which ask for 16 bytes each
    found = replace(kernel, warps=warps, resident=resident, least=2 if long else 4, runs=runs, bulk=bulk)
    while found.warps > 2 and not _fits(found, 1, device):  # heads of 512 on cards with little shared memory
        found = replace(found, warps=found.warps // 2)
    ahead = replace(found, stages=2)
    return ahead if few and not long and _fits(ahead, 1, device) else found


def _fits(kernel: AttendKernel, blocks: int, device: DeviceProfile) -> bool:
    return (kernel.shared_bytes + _STATIC_BYTES) * blocks <= device.shared_bytes


def _are_few(decodes: int, kv_heads: int, device: DeviceProfile) -> bool:
    return 2 * decodes * kv_heads <= device.processors


_LOG = logging.getLogger(__name__)
_SIZES = "p" * 24 + "ffff" + "i" * 8


class DecodeAttention:
    def __init__(self, device: torch.device, capability: tuple[int, int]) -> None:
        self._device, self._arch = device, architecture(capability)
        self._kernels: dict[AttendKernel, Kernel | PlannedKernel] = {}

    def prepare(self, wanted: Iterable[AttendKernel]) -> None:
        """Compile and load kernels, in parallel where they are not on disk yet; Triton's kernel runs for other shapes.

        For a device that is planned for (`meta`) they are only compiled, by others. Raises KernelError where one does
        not compile, or the device refuses it.
        """
        wanted = list(dict.fromkeys(wanted))
        for kernel in wanted:
            if not kernel.supported:
                _LOG.debug("decode attention runs in Triton for %s", kernel)
        missing = [kernel for kernel in wanted if kernel not in self._kernels and kernel.supported]
        sources = [kernel.source() for kernel in missing]
        if self._device.type == "meta":
            begin_compiling(sources, self._arch)
            self._kernels |= dict.fromkeys(missing, PlannedKernel())
            return
        for kernel, source, cubin in zip(missing, sources, compile_sources(sources, self._arch), strict=True):
            self._kernels[kernel] = Kernel(cubin, source.name, kernel.shared_bytes)

    def ready(self, kernel: AttendKernel) -> bool:
        return kernel in self._kernels

    def launch(
        self, kernel: AttendKernel, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float], integers: Sequence[int], dependent: bool,
    ) -> None:  # fmt: skip
        """Start a kernel; arguments in the order of attend.cu, None for what is not read. KernelError: it is
        refused.
        """
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        stream = stream_of(self._device)
        self._kernels[kernel].launch(
            grid, kernel.warps * 32, [*addresses, *numbers, *integers], _SIZES, stream, dependent
        )
