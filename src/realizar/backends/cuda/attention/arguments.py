"""Arguments that several of the kernels around attention share."""

from __future__ import annotations

from typing import Any

import torch

from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.attention.rope_tables import RopeTables
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import TRITON_TYPES, block_keys, block_stages, native_rows, padded_head
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.inputs import CHUNK, ActivationBuffer
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.norms import NORM_KINDS
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import AttentionBlock, SharedAttentionBlock
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention


def columns(attention: Attention | SharedAttention) -> tuple[int, int]:
    """The first columns of keys and of values in the output of the QKV matmul; its end where it has none."""
    queries = attention.num_heads * attention.head_size
    if isinstance(attention, SharedAttention):
        return queries, queries
    keys = 0 if attention.is_k_also_v else attention.num_kv_heads * attention.head_size
    return queries, queries + keys


def gate_column(attention: Attention) -> int:
    return columns(attention)[1] + attention.num_kv_heads * attention.head_size


def _is_summed(attention: Attention | SharedAttention) -> bool:
    """True if a norm over all heads of a token has summed the matmul's splits into the first, and added its bias."""
    return attention.qk_norm_axis == "token"


class AttentionArguments:
    """Finds a layer's arguments among weights, workspace, cache and rope tables.

    With `batch_invariant` results are written alike by all kernels, whatever the step. `none` stands for a tensor that
    a kernel does not read.
    """

    def __init__(
        self, weights: Weights, workspace: Workspace, kv: KVMemory, ropes: RopeTables, device: DeviceProfile,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self._device, self._weights, self._space, self._kv, self._ropes = device, weights, workspace, kv, ropes
        self._batch_invariant = batch_invariant
        self.none = torch.zeros(1, device=workspace.hidden.device)

    def rotated(self, attention: Attention | SharedAttention, linear: MergedLinear, kind: StepKind) -> list[Any]:
        """The arguments of `rotated_heads` up to `value_at`, for the output of `linear`."""
        bias, norms = linear.bias, (attention.q_norm, attention.k_norm)
        if _is_summed(attention):
            norms, bias = (None, None), None
        norm = norms[0] or norms[1]
        weights = [self._weights.norm_weight(n) if n else self.none for n in norms]
        biases = [self._weights.vector(n.bias) if n and n.bias else self.none for n in norms]
        partials = self._space.partials(linear.splits(kind), kind.tokens, linear.width)
        return [
            partials, partials.stride(0), partials.stride(1), self.none if bias is None else bias,
            self._space.arrays.angles, *self._ropes.get(attention.rope),
            self._ropes.query_scales(attention.query_growth), *weights, *biases, float(norm.eps) if norm else 0.0,
            float(attention.v_norm_eps or 0.0), *columns(attention),
        ]  # fmt: skip

    def rotated_constants(
        self, attention: Attention | SharedAttention, linear: MergedLinear, kind: StepKind
    ) -> dict[str, Any]:
        """The compile-time constants of `rotated_heads`, and of kernels that start from it."""
        rope, summed = attention.rope, _is_summed(attention)
        norm = None if summed else attention.q_norm or attention.k_norm
        return {
            "SPLITS": 1 if summed else linear.splits(kind), "BIAS": not summed and linear.bias is not None,
            "HEADS": attention.num_heads, "KV_HEADS": attention.num_kv_heads, "HEAD": attention.head_size,
            "PADDED_HEAD": padded_head(attention), "ROTARY": rope.size if rope else 0,
            "INTERLEAVED": bool(rope and rope.pairing == "interleaved"),
            "NORM": NORM_KINDS[norm.kind] if norm else 0, "NORM_BIAS": bool(norm and norm.bias),
            "VALUE_NORM": attention.v_norm_eps is not None, "GROWTH": attention.query_growth is not None,
            "STORED": isinstance(attention, SharedAttention), "BLOCK_SIZE": self._kv.block_size,
        }  # fmt: skip

    def cache(self, layer: int) -> tuple[torch.Tensor, ...]:
        cache = self._kv.layers[layer]
        return cache.keys, cache.values, cache.key_scales, cache.value_scales

    def sinks(self, attention: Attention | SharedAttention) -> torch.Tensor:
        return self._weights.vector(attention.sinks) if attention.sinks else self.none

    def shared(self, block: AttentionBlock | SharedAttentionBlock) -> dict[str, Any]:
        """Constants and launch options that both Triton kernels of attention take."""
        attention, arrays, compute = block.attention, self._space.arrays, self._space.query.dtype
        return {
            "TABLE_ROWS": arrays.sizes.rows, "CACHE_GROUP": self._kv.group_of(block.cache_layer),
            "WINDOW": attention.window or 0, "SOFT_CAP": attention.soft_cap is not None,
            "SINKS": attention.sinks is not None, "COMPUTE": TRITON_TYPES[compute],
            "KEYS": block_keys(attention, compute, self._device), **block_stages(attention),
        }  # fmt: skip

    def direct(
        self, attention: Attention | SharedAttention, consumer: MergedLinear, kind: StepKind
    ) -> ActivationBuffer | None:
        """The output projection's input, if attention can write it; None where the result must be converted.

        Kernels of decodes alone write all formats but 8-bit floats; beside chunks all write halves if CUDA C++ attends
        these, or else none. Hopper's writes 8-bit floats of heads that are whole scales, of steps without decodes. With
        `batch_invariant` all write halves.
        """
        if attention.gate is not None:
            return None
        formats, width = consumer.input_formats(kind), attention.num_heads * attention.head_size
        group = width // attention.num_kv_heads
        own = formats[0].kind in ("int8", "half")
        whole = attention.head_size == padded_head(attention) and group % CHUNK == 0
        if self._batch_invariant or (kind.tiles and native_rows(attention, self._kv.dtype, self._device, fixed=False)):
            is_fp8 = formats[0].kind == "fp8" and not kind.decodes and attention.head_size % 128 == 0 and not kind.whole
            writes = is_fp8 or (whole and formats[0].kind == "half")
        else:
            writes = not kind.tiles and (whole if own else formats[0].kind == "f32")
        return self._space.activations.get(formats[0], width) if writes and len(formats) == 1 else None

    def halves(self, attention: Attention | SharedAttention, consumer: MergedLinear, kind: StepKind) -> dict[str, Any]:
        """The arguments of `write_result` for halves, of the Triton kernels with `batch_invariant`, and of chunks."""
        target = self.direct(attention, consumer, kind)
        if target is None:
            return {"values_out": self.none, "value_scale": self.none, "block_tokens": 1, "chunks": 1, "HALVES": False}
        return {
            "values_out": target.values, "value_scale": target.scales, "block_tokens": target.format.block_tokens,
            "chunks": target.chunks, "HALVES": True,
        }  # fmt: skip
