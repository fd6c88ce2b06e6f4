"""Times attention of one chunk alone: Hopper's kernel, that of mma.sync, Triton's, and those of torch.

    python scripts/attention/chunks.py --head 128 --tokens 8192
    python scripts/attention/chunks.py --head 128 --tokens 2048 --past 14336
    TRITON_OVERRIDE_ARCH=sm80 python scripts/attention/chunks.py --card-kib 163

Torch's are FlashAttention-2, which multiplies by mma.sync, and cuDNN where nothing lies before. The last line times on
Hopper what a card of 8.0 runs: the shape for its shared memory, and Triton's code for it. With `--int8` the cache has
codes and scales; with `--whole` Hopper's kernel cuts no context into parts, and with `--part 512` it and Triton's cut
them at multiples of 512 keys. Each runs for as long as the others in turn, and the order turns too: the card's power
limit sets its clock, so what follows a lighter kernel is faster. Blocks of the cache lie in a random order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from realizar.backends.cuda.attention.chunks import chunk_inputs
from realizar.backends.cuda.kernel_sizes import CHUNK_PARTS, TRITON_TYPES
from realizar.backends.cuda.kernels.attend import attend_chunk
from realizar.backends.cuda.matmul.inputs import InputFormat, make_buffer
from realizar.backends.cuda.native.chunks.source import (
    AttendChunkKernel,
    SyncChunkKernel,
    chunk_rows,
    sync_rows,
    sync_shape,
)
from realizar.backends.cuda.native.compiler import architecture
from realizar.backends.cuda.native.launcher import LoadedKernels

BLOCK, ROUNDS, TURN_MS = 32, 4, 60.0


class Inputs:
    """A row's chunk, queries and cache in bf16, or queries in float16 with codes and scales of a cache in int8.

    `tables` are the integers of a step, for tiles of so many tokens.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.heads, self.length = asked, asked.kv_heads * asked.group, asked.past + asked.tokens
        blocks = -(-self.length // BLOCK)
        cache = blocks, asked.kv_heads, BLOCK, asked.head
        self.kv_dtype, self.dtype = ("int8", torch.float16) if asked.int8 else ("bf16", torch.bfloat16)
        if asked.int8:
            of_scales = *cache[:3], -(-asked.head // 32)
            codes = [torch.randint(-127, 128, cache, device="cuda", dtype=torch.int8) for _ in range(2)]
            self.cache = *codes, *(torch.rand(of_scales, device="cuda").half() / 64 for _ in range(2))
        else:
            none = torch.zeros(1, device="cuda")
            self.cache = *(torch.randn(cache, device="cuda").bfloat16() for _ in range(2)), none, none
        self.query = torch.randn(asked.tokens, self.heads * asked.head, device="cuda").to(self.dtype)
        self.table = torch.randperm(blocks, device="cuda").int()
        self.sinks = torch.randn(self.heads, device="cuda")
        self.out = torch.zeros(asked.tokens, self.heads * asked.head, device="cuda")
        self.scale = asked.head**-0.5

    def tables(self, tokens: int) -> list[torch.Tensor]:
        firsts = list(range(0, self.asked.tokens, tokens))[::-1]
        lists = [0] * len(firsts), firsts, [0], [self.asked.tokens], [self.length], [len(self.table)]
        *before, stride = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in lists)
        return [*before, self.table, stride]

    @property
    def flops(self) -> float:
        window: int = self.asked.window or self.length
        seen = sum(min(position + 1, window) for position in range(self.asked.past, self.length))
        return float(4 * seen * self.heads * self.asked.head)


def hoppers(inputs: Inputs) -> AttendChunkKernel:
    asked = inputs.asked
    tokens = chunk_rows(asked.head, inputs.kv_dtype) // asked.group
    return AttendChunkKernel(
        asked.head, asked.group, tokens, inputs.kv_dtype, BLOCK, asked.window, asked.cap > 0, asked.sinks, asked.part
    )


def by_mma_sync(inputs: Inputs) -> SyncChunkKernel | None:
    asked = inputs.asked
    shape = sync_shape(asked.head, asked.card_kib << 10, plain=not asked.window and not asked.cap)
    if shape is None or asked.part or not sync_rows(asked.head, inputs.kv_dtype, asked.card_kib << 10):
        return None
    return SyncChunkKernel(
        asked.head, asked.group, shape.rows // asked.group, inputs.kv_dtype, BLOCK, asked.window, asked.cap > 0,
        asked.sinks, shape,
    )  # fmt: skip


def native(inputs: Inputs, kernel: AttendChunkKernel | SyncChunkKernel) -> Callable[[], None]:
    asked, tokens = inputs.asked, kernel.tokens
    read = chunk_inputs(kernel, inputs.query, inputs.cache, inputs.heads)
    tables = inputs.tables(tokens)
    halves = make_buffer(InputFormat("half", 128), inputs.out.shape[1], asked.tokens, inputs.out.device)
    written = inputs.out, halves.values, halves.scales
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    next_tile, arrivals = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (1, CHUNK_PARTS * kernel.warps))
    parts = torch.zeros(CHUNK_PARTS * kernel.part_floats, device="cuda")
    tensors = [*tables, inputs.sinks, *written, next_tile, parts, inputs.out, arrivals]
    tiles = len(tables[0])
    own = inputs.scale, asked.cap, asked.window, tiles, asked.kv_heads, 0, inputs.out.stride(0), 128, halves.chunks
    numbers = *own, 0 if asked.whole else CHUNK_PARTS, 0
    arguments = [*read, *(each.data_ptr() for each in tensors), *numbers]
    loaded = LoadedKernels(architecture(torch.cuda.get_device_capability()))[kernel.source()]
    grid = kernel.grid(tiles, asked.kv_heads, processors)

    def run(_kept: object = tensors) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        loaded.launch(grid, kernel.threads, arguments, kernel.sizes, stream, dependent=False)

    return run


def in_triton(inputs: Inputs) -> Callable[[], None]:
    asked, none = inputs.asked, torch.zeros(1, device="cuda")
    tokens, wide = (128 if asked.head <= 128 else 64) // asked.group, asked.head > 256
    tables = inputs.tables(tokens)
    return lambda: attend_chunk[(len(tables[0]), asked.kv_heads)](
        inputs.query, *inputs.cache, inputs.sinks, inputs.out, *tables, none, inputs.scale,
        asked.cap or 1.0, inputs.query.stride(0), inputs.out.stride(0), none, none, 1, 1, TABLE_ROWS=1, CACHE_GROUP=0,
        HEADS=inputs.heads, KV_HEADS=asked.kv_heads, HEAD=asked.head, PADDED_HEAD=triton.next_power_of_2(asked.head),
        BLOCK_SIZE=BLOCK, WINDOW=asked.window, SOFT_CAP=asked.cap > 0, SINKS=asked.sinks, INT8=asked.int8,
        COMPUTE=TRITON_TYPES[inputs.dtype], KEYS=32 if wide else 64,
        QUERIES=triton.next_power_of_2(tokens * asked.group), TOKENS=tokens, PART=asked.part, HALVES=False, WHOLE=False,
        DEPENDENT=False, num_warps=8, **({"num_stages": 1} if wide else {}),
    )  # fmt: skip


def in_torch(inputs: Inputs, backend: SDPBackend) -> Callable[[], None]:
    asked = inputs.asked
    lengths = asked.tokens, inputs.length, inputs.length
    heads = inputs.heads, asked.kv_heads, asked.kv_heads
    q, k, v = (
        torch.randn(1, n, length, asked.head, device="cuda").bfloat16()
        for n, length in zip(heads, lengths, strict=True)
    )
    mask = causal_lower_right(asked.tokens, inputs.length) if asked.past else None

    def run() -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)

    return run


def turn_ms(run: Callable[[], None], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integer = partial(parser.add_argument, type=int)
    integer("--head", default=128)
    integer("--group", default=4)
    integer("--kv-heads", default=8)
    integer("--tokens", default=8192)
    integer("--past", default=0)
    integer("--window", default=0)
    parser.add_argument("--cap", type=float, default=0.0)
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--whole", action="store_true")
    integer("--part", default=0)
    integer("--card-kib")
    asked = parser.parse_args()
    asked.card_kib = asked.card_kib or torch.cuda.get_device_properties(0).shared_memory_per_block_optin >> 10
    inputs = Inputs(asked)
    runs: dict[str, Callable[[], None]] = {}
    if torch.cuda.get_device_capability() == (9, 0):
        runs["Hopper's"] = native(inputs, hoppers(inputs))
    if (kernel := by_mma_sync(inputs)) is not None:
        runs["mma.sync"] = native(inputs, kernel)
    runs["Triton"] = in_triton(inputs)
    if not (asked.window or asked.cap or asked.sinks or asked.int8 or asked.part or asked.head > 256):
        runs["FlashAttention-2"] = in_torch(inputs, SDPBackend.FLASH_ATTENTION)
        if not asked.past:
            runs["cuDNN"] = in_torch(inputs, SDPBackend.CUDNN_ATTENTION)
    counts = {}
    for name, run in runs.items():
        run()
        counts[name] = max(2, round(TURN_MS / turn_ms(run, 3)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in [*runs][turn % len(runs) :] + [*runs][: turn % len(runs)]:
            turn_ms(runs[name], counts[name])  # until the clock is that of this kernel
            found[name].append(turn_ms(runs[name], counts[name]))
    print(" ".join(sys.argv[1:]))
    for name, ms in found.items():
        rates = sorted(inputs.flops / each / 1e9 for each in ms)
        mean = inputs.flops * len(ms) / sum(ms) / 1e9
        print(f"  {name:16} {sum(ms) / len(ms):7.3f} ms {mean:6.0f} TFLOP/s ({rates[0]:.0f} to {rates[-1]:.0f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
