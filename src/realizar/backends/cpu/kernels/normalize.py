"""RMSNorm, LayerNorm, adding to the residual stream, and quantising: one pass per token; and the tokens to go on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from realizar.backends.cpu.activation_layout import GROUP, RECORD_BYTES
from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.quantize import offset_of, quantize_group, quantize_residual
from realizar.backends.cpu.memory import copy, read_i64, view
from realizar.backends.cpu.records import Record
from realizar.models.parts import Norm

NO_NORM, RMS_NORM, LAYER_NORM, SCALE = 0, 1, 2, 3

# `out` (float32) and `records` are written where not 0; `residual` gets residual_scale * result added where not 0.
# `terms`, where not 0, are records of twice the tokens: each one's, and those of what they leave over.
# `width` values count; rows are padded with zeros to whole groups of 32.
NORMALIZE = Record(
    "step count_field input input_stride width kind eps=f32 weight bias out out_stride records records_groups "
    "records_width residual residual_stride residual_scale=f32 terms"
)


def norm_kind(norm: Norm | None) -> int:
    """The field `kind` of a norm; None copies."""
    return NO_NORM if norm is None else {"rms": RMS_NORM, "layer": LAYER_NORM, "scale": SCALE}[norm.kind]


@njit(fastmath=True)
def normalize_row(x: Any, y: Any, kind: int, eps: float, weight: Any, bias: Any, has_bias: bool) -> None:
    """y = norm(x) * weight + bias, in float32."""
    width = x.size
    mean = np.float32(0.0)
    if kind == LAYER_NORM:
        for i in range(width):
            mean += x[i]
        mean /= np.float32(width)
    sum_of_squares = np.float32(0.0)
    for i in range(width):
        sum_of_squares += (x[i] - mean) * (x[i] - mean)
    factor = np.float32(1.0) / np.sqrt(sum_of_squares / np.float32(width) + np.float32(eps))
    for i in range(width):
        y[i] = (x[i] - mean) * factor * weight[i]
    if has_bias:
        for i in range(width):
            y[i] += bias[i]


@njit
def copy_record(source: int, target: int) -> None:
    """One record of activations, as int64 words."""
    words, copied = view(source, RECORD_BYTES // 8, np.int64), view(target, RECORD_BYTES // 8, np.int64)
    for i in range(RECORD_BYTES // 8):
        copied[i] = words[i]


@njit
def write_group(values: int, token: int, group: int, records: int, terms: int, groups: int, lanes: int) -> None:
    """The record of a group of a token's float32 at `values`, and where `terms` is not 0 its two terms."""
    values += group * GROUP * 4
    record = records + offset_of(token, group, groups, lanes)
    quantize_group(values, record)
    if terms != 0:
        first = terms + offset_of(2 * token, group, groups, lanes)
        copy_record(record, first)
        quantize_residual(values, first, terms + offset_of(2 * token + 1, group, groups, lanes))


@kernel()
def normalize(address: int, thread: int, threads: int) -> None:
    """Tokens are divided among threads."""
    arguments = NORMALIZE(address)
    tokens = read_i64(arguments.step, arguments.count_field)
    width, kind, eps = arguments.width, arguments.kind, arguments.eps
    weight = view(arguments.weight, width, np.float32)
    bias = view(arguments.bias, width, np.float32)
    out, residual, scale, terms = arguments.out, arguments.residual, arguments.residual_scale, arguments.terms
    records, groups, lanes = arguments.records, arguments.records_groups, arguments.records_width
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        source = arguments.input + token * arguments.input_stride
        target = out + token * arguments.out_stride
        x, y = view(source, width, np.float32), view(target, width, np.float32)
        if kind == SCALE:
            for i in range(width):
                y[i] = x[i] * weight[i]
        elif kind != NO_NORM:
            normalize_row(x, y, kind, eps, weight, bias, arguments.bias != 0)
        elif out != source:
            copy(source, target, width)
        if residual != 0:
            total = view(residual + token * arguments.residual_stride, width, np.float32)
            for i in range(width):
                total[i] += scale * y[i]
        if records != 0:
            for group in range((width + GROUP - 1) // GROUP):
                write_group(target, token, group, records, terms, groups, lanes)


# `out` and `records` as those of NORMALIZE; `out` may be `input`.
CLIP = Record(
    "step count_field input input_stride width low=f32 high=f32 out out_stride records records_groups records_width"
)


@kernel()
def clip(address: int, thread: int, threads: int) -> None:
    """Values of each token within two numbers; the rest of the last group of 32 becomes zero."""
    arguments = CLIP(address)
    tokens = read_i64(arguments.step, arguments.count_field)
    width, low, high = arguments.width, arguments.low, arguments.high
    count = (width + GROUP - 1) // GROUP
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        target = arguments.out + token * arguments.out_stride
        x = view(arguments.input + token * arguments.input_stride, width, np.float32)
        y = view(target, count * GROUP, np.float32)
        for i in range(width):
            y[i] = min(max(x[i], low), high)
        y[width:] = 0.0
        if arguments.records != 0:
            for group in range(count):
                place = arguments.records + offset_of(token, group, arguments.records_groups, arguments.records_width)
                quantize_group(target + group * GROUP * 4, place)


# `out`, `records` and `terms` as those of NORMALIZE; `order` is int32 [width].
REORDER = Record(
    "step count_field input input_stride width order out out_stride records records_groups records_width terms"
)


@kernel()
def reorder(address: int, thread: int, threads: int) -> None:
    """Each token's columns `order`, float32 and in records, of a whole number of groups of 32."""
    arguments = REORDER(address)
    tokens, width = read_i64(arguments.step, arguments.count_field), arguments.width
    order, terms = view(arguments.order, width, np.int32), arguments.terms
    records, groups, lanes = arguments.records, arguments.records_groups, arguments.records_width
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        target = arguments.out + token * arguments.out_stride
        x = view(arguments.input + token * arguments.input_stride, width, np.float32)
        y = view(target, width, np.float32)
        for i in range(width):
            y[i] = x[order[i]]
        for group in range(width // GROUP):
            write_group(target, token, group, records, terms, groups, lanes)


SELECT = Record("step count_field indices input input_stride out out_stride width")


@kernel()
def select(address: int, thread: int, threads: int) -> None:
    """The hidden states of the tokens whose logits are wanted, float32 [count, width], one after another."""
    arguments = SELECT(address)
    count = read_i64(arguments.step, arguments.count_field)
    indices = view(arguments.indices, max(count, 1), np.int32)
    width = arguments.width
    for token in range(count * thread // threads, count * (thread + 1) // threads):
        source = arguments.input + indices[token] * arguments.input_stride
        copy(source, arguments.out + token * arguments.out_stride, width)
