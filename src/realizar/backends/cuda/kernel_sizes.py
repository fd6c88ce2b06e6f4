"""Tiles, warps and splits of the Triton kernels, by plain arithmetic on shapes and the device's profile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.layouts.activations import padded_cols
from realizar.backends.cuda.native.chunks.source import ALONE_ROWS, chunk_rows, sync_rows
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention, ModelSpec

KEYS, _LEAST_KEYS = 64, 16  # keys of a block of attention, at most and at least
_WIDE_HEAD = 256  # beyond which blocks of so many keys fit in no card's shared memory
_LARGE_SHARED_BYTES = 160 << 10  # of a block: cards of 8.0, 9.0 and 10.0 have more, those of 8.6, 8.9 and 12.0 less
MAX_PARTS = 64  # parts of a context
_SYNC_CARDS = 8, 9, 12  # whose chunks mma.sync attends, by the major compute capability
CHUNK_PARTS = 400  # parts of the contexts of a step's chunks, at most: three for each of an H200's processors
# Of kernels.activate, where 3 is no activation.
ACTIVATIONS: dict[GatedActivation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped": 4, "relu_squared": 5}
_MANY_TOKENS = 256  # more have programs for all multiprocessors where each has a token
_LEAST_PART, _FIXED_PARTS = 512, 32  # keys of a part at fixed places; parts of the longest context, at most


@dataclass(frozen=True, slots=True)
class WidthCut:
    """A token's columns cut into blocks: grid (tokens, blocks)."""

    block: int
    blocks: int
    warps: int


def whole_width(cols: int) -> WidthCut:
    block = max(128, int(triton.next_power_of_2(cols)))
    return WidthCut(block, 1, min(32, max(1, block // 256)))


def width_in_blocks(cols: int) -> WidthCut:
    """Several programs per token; every block starts at a multiple of 256 columns."""
    return WidthCut(256, -(-padded_cols(cols) // 256), 2)


def gate_blocks(cols: int, tokens: int) -> WidthCut:
    """The cut of gated heads: a token at once where there are many, so that no program waits for the others of it."""
    whole = whole_width(padded_cols(cols))
    return replace(whole, warps=min(whole.warps, 8)) if tokens > _MANY_TOKENS else width_in_blocks(cols)


def norm_blocks(cols: int) -> WidthCut:
    """The cut of the residual stream, the same for any number of tokens: a token's bits must not depend on it."""
    block = 256 if cols <= 2048 else 512
    return WidthCut(block, -(-padded_cols(cols) // block), block // 128)


def norm_square_parts(cols: int) -> int:
    """Partial sums of a token's squares: one for each block, up to a power of two that is a multiple of 8."""
    return max(8, int(triton.next_power_of_2(norm_blocks(cols).blocks)))


def activation_blocks(cols: int, tokens: int) -> WidthCut:
    """The cut of the widest activations: larger blocks where there are many tokens."""
    return width_in_blocks(cols) if tokens < 16 else WidthCut(1024, -(-padded_cols(cols) // 1024), 4)


def padded_head(attention: Attention | SharedAttention) -> int:
    return max(32, triton.next_power_of_2(attention.head_size))


def rotate_sizes(attention: Attention | SharedAttention, *, norms: bool) -> tuple[int, int]:
    """Heads that one program rotates, and its warps; `norms`: it norms them first.

    They are the same for any number of tokens: a token's bits must not depend on it.
    """
    return (4, 4) if norms or padded_head(attention) > 128 else (8, 2)


def block_keys(attention: Attention | SharedAttention, compute: torch.dtype, device: DeviceProfile) -> int:
    """Keys of a block of attention: fewer where heads are wide, and on cards with little shared memory."""
    halvings = [
        padded_head(attention) > _WIDE_HEAD,
        padded_head(attention) > _WIDE_HEAD // 2 and compute == torch.float32,
        padded_head(attention) > _WIDE_HEAD // 2 and device.shared_bytes < _LARGE_SHARED_BYTES,
    ]
    return max(_LEAST_KEYS, KEYS >> sum(halvings))


def block_stages(attention: Attention | SharedAttention) -> dict[str, int]:
    """The launch option that bounds how many blocks of keys are on their way, where heads are wide."""
    return {"num_stages": 1} if padded_head(attention) > _WIDE_HEAD else {}


def shared_heads(attention: Attention | SharedAttention) -> int:
    """Heads that share a KV head, and the new key and value, padded to what a matrix unit takes."""
    return max(16, triton.next_power_of_2(attention.num_heads // attention.num_kv_heads + 2))


def native_rows(attention: Attention | SharedAttention, kv_dtype: str, device: DeviceProfile, fixed: bool) -> int:
    """Queries of a tile of a chunk, at most, where CUDA C++ attends chunks: by wgmma on Hopper, or else by mma.sync.

    0 where Triton does: for other sizes and caches (`native.chunks.source`), and on 10.0, whose matrix instructions it
    has. Where contexts are cut at `fixed` places the kernel attends single tokens, too: that of mma.sync does not,
    Hopper's has no registers for it with heads of 512, and neither has the bits of Triton's, which attends images that
    are seen whole (`StepKind.whole`).
    """
    if not device.runs("attention") or (fixed and attention.sees_images_whole):
        return 0
    rows = most = 0
    if device.has_wgmma:
        rows = 0 if fixed and attention.head_size > _WIDE_HEAD else chunk_rows(attention.head_size, kv_dtype)
        most = min(rows, ALONE_ROWS) if fixed else rows
    elif not fixed and device.capability[0] in _SYNC_CARDS:
        rows = most = sync_rows(attention.head_size, kv_dtype, device.shared_bytes)
    return rows if attention.num_heads // attention.num_kv_heads <= most else 0


def tile_tokens(spec: ModelSpec, kv_dtype: str, device: DeviceProfile, fixed: bool) -> int:
    """Tokens of a tile of a chunk, the same in all layers; `fixed` where contexts are cut at fixed places."""
    attentions = [attention for _, attention in spec.all_attentions()]
    group = max(a.num_heads // a.num_kv_heads for a in attentions)
    in_float32 = compute_type(kv_dtype, is_gpu=device.has_cuda_kernels or device.is_gpu) == torch.float32

    def rows(attention: Attention | SharedAttention) -> int:
        wide = padded_head(attention)
        # `attend_parts` turns a tile's float32 sums around in shared memory: 128 KiB for 64 queries of 512.
        few = in_float32 or (fixed and wide > _WIDE_HEAD and device.shared_bytes < _LARGE_SHARED_BYTES)
        return native_rows(attention, kv_dtype, device, fixed) or triton_rows(attention, few=few)

    return max(1, min(map(rows, attentions)) // group)


def triton_rows(attention: Attention | SharedAttention, *, few: bool) -> int:
    """Queries of a tile of `attend_chunk`, at most; `few` where it has room for fewer."""
    return 32 if few else 128 if padded_head(attention) <= 128 else 64


def chunk_queries(attention: Attention | SharedAttention, tokens: int, compute: torch.dtype) -> tuple[int, int]:
    """Queries of a tile of `tokens` tokens of `attend_chunk`, padded, and its warps."""
    group = attention.num_heads // attention.num_kv_heads
    return max(16, triton.next_power_of_2(tokens * group)), 4 if compute == torch.float32 else 8


def decode_queries(attention: Attention | SharedAttention, tokens: int, compute: torch.dtype) -> tuple[int, int]:
    """Queries and warps of `attend_parts`: half those of `attend_chunk` where its warps still have 16 queries each."""
    queries, warps = chunk_queries(attention, tokens, compute)
    return (queries // 2, warps // 2) if queries == 16 * warps and queries == 128 else (queries, warps)


def part_keys(context_length: int) -> int:
    """Keys of a part of a context that is cut at fixed places: a power of two, by the longest context alone."""
    return max(_LEAST_PART, int(triton.next_power_of_2(-(-context_length // _FIXED_PARTS))))


def fixed_parts(context_length: int) -> int:
    """Parts that a context may lie in where it is cut at fixed places."""
    return -(-context_length // part_keys(context_length))


def decode_parts(
    attention: Attention | SharedAttention, decodes: int, context_length: int, device: DeviceProfile
) -> int:
    """Parts that a context is cut into: enough programs for all processors, a power of two."""
    most = max(1, min(MAX_PARTS, triton.next_power_of_2(-(-context_length // KEYS))))
    wanted = -(-4 * device.processors // (decodes * attention.num_kv_heads))
    return min(most, triton.next_power_of_2(wanted))


def attention_parts(
    spec: ModelSpec, row_counts: list[int], context_length: int, device: DeviceProfile, kv_dtype: str, fixed: bool
) -> int:
    """Decodes times parts of their contexts, at most, or as many as take what chunks' parts do.

    `fixed` where contexts are cut at fixed places.
    """
    of_chunks = chunk_parts(spec, kv_dtype, device, fixed)
    if fixed:
        return max(of_chunks, max(row_counts) * fixed_parts(context_length))
    decodes = (
        rows * decode_parts(attention, rows, context_length, device)
        for _, attention in spec.all_attentions()
        for rows in row_counts
    )
    return max(of_chunks, *decodes)


def chunk_parts(spec: ModelSpec, kv_dtype: str, device: DeviceProfile, fixed: bool) -> int:
    """Parts of decodes' contexts that take as much memory as all parts of chunks'; 0 where these are not cut."""
    if not device.has_wgmma:
        return 0
    attentions = [attention for _, attention in spec.all_attentions()]
    rows = (native_rows(each, kv_dtype, device, fixed) * (each.head_size + 16) for each in attentions)
    return CHUNK_PARTS * -(-max(rows) // max(each.num_heads * each.head_size for each in attentions))


def compute_type(kv_dtype: str, *, is_gpu: bool) -> torch.dtype:
    """Element type that attention multiplies in; the interpreter multiplies in float32 alone."""
    if not is_gpu:
        return torch.float32
    return {"f32": torch.float32, "bf16": torch.bfloat16}.get(kv_dtype, torch.float16)


def matmul_type(device: DeviceProfile) -> tl.dtype:
    """Element type that the plain matmul multiplies in."""
    return tl.float16 if device.torch_device.type != "cpu" else tl.float32


TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
