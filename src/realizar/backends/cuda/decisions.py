"""What loading has decided, for the log: the card, how matrices are multiplied, and which kernels were refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.quantized import Products
from realizar.sizes import format_bytes


def describe_card(device: DeviceProfile, compute: str, kv_dtype: str) -> str:
    """One line."""
    major, minor = device.capability
    return (
        f"{device.name}, compute capability {major}.{minor}, {device.processors} multiprocessors,"
        f" {format_bytes(device.memory_bytes)}; attention multiplies in {compute}, the KV cache holds {kv_dtype};"
        f" kernels may start early: {'yes' if device.has_dependent_launch else 'no'}"
    )


def describe_refused(products: Products | None) -> Iterator[str]:
    """A line for each kernel that did not compile or fit, and was replaced."""
    if products is None:
        yield "no CUDA C++ products on this device: Triton multiplies"
        return
    for _, tiles, ending in sorted(products.refused, key=repr):
        yield f"refused: {tiles} ending with {ending}"


def describe_routes(linears: Iterable[MergedLinear], counts: Iterable[int]) -> Iterator[str]:
    """A line for each kind of product: by numbers of tokens, the format of its input, its kernel and its splits."""
    numbers, seen = sorted(counts), set()
    for linear in linears:
        ways = [(count, _way(linear, count)) for count in numbers]
        parts = []
        for way, same in groupby(ways, key=lambda pair: pair[1]):
            of = [count for count, _ in same]
            parts.append(f"{of[0]} to {of[-1]}: {way}" if len(of) > 1 else f"{of[0]}: {way}")
        line = f"product of {linear.cols} columns to {linear.width}, by tokens: {'; '.join(parts)}"
        if line not in seen:
            seen.add(line)
            yield line


def _way(linear: MergedLinear, rows: int) -> str:
    """How a product of so many tokens runs."""
    forms = "+".join(form.kind for form in linear.forms(rows))
    kernels = "+".join(dict.fromkeys(str(config.tiles) for _, config in linear.routes(rows))) or "Triton or cuBLAS"
    ending = ""
    if linear.is_gated(rows):
        ending = " ending with the activation"
    elif linear.joins(rows):
        ending = " added to the stream"
    return f"{forms} by {kernels}, {linear.splits(rows)} splits{ending}"
