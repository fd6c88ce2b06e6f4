"""Decisions of loading as log lines: the GPU, the kernel of each matmul, and the kernels that were refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from realizar.backends.cuda.device import SLOWER, DeviceProfile
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.sizes import format_bytes


def describe_card(device: DeviceProfile, compute: str, kv_dtype: str) -> str:
    """A line about the GPU, the types of attention and cache, and early starts of kernels."""
    major, minor = device.capability
    return (
        f"{device.name}, compute capability {major}.{minor}, {device.processors} multiprocessors,"
        f" {format_bytes(device.memory_bytes)}; attention multiplies in {compute}, the KV cache holds {kv_dtype};"
        f" kernels may start early: {'yes' if device.has_dependent_launch else 'no'}"
    )


def describe_refused(device: DeviceProfile) -> Iterator[str]:
    """A line for each family of kernels that is replaced."""
    if not device.has_matmuls:
        yield "no CUDA C++ matmuls on this device: Triton multiplies"
    for family in sorted(device.without):
        yield f"without the kernels of {family}: {SLOWER[family]}"


def describe_routes(linears: Iterable[MergedLinear], counts: Iterable[int]) -> Iterator[str]:
    """A line for each kind of matmul: by numbers of tokens, the format of its input, its kernel and its splits."""
    numbers, seen = sorted(counts), set()
    for linear in linears:
        ways = [(count, _way(linear, StepKind(count))) for count in numbers]
        parts = []
        for way, same in groupby(ways, key=lambda pair: pair[1]):
            of = [count for count, _ in same]
            parts.append(f"{of[0]} to {of[-1]}: {way}" if len(of) > 1 else f"{of[0]}: {way}")
        line = f"matmul of {linear.cols} columns to {linear.width}, by tokens: {'; '.join(parts)}"
        if line not in seen:
            seen.add(line)
            yield line


def _way(linear: MergedLinear, kind: StepKind) -> str:
    """The kernel, splits and epilogue of a matmul in a step of this kind."""
    input_kinds = "+".join(input_format.kind for input_format in linear.input_formats(kind))
    kernels = "+".join(dict.fromkeys(str(config.tiles) for _, config in linear.routes(kind))) or "Triton or cuBLAS"
    epilogue = ""
    if linear.is_gated(kind):
        epilogue = " with the activation epilogue"
    elif linear.adds_residual(kind):
        epilogue = " with the residual-add epilogue"
    return f"{input_kinds} by {kernels}, {linear.splits(kind)} splits{epilogue}"
