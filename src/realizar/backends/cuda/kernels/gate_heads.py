"""The gates of attention, of gated delta nets and of layers' own inputs: what they gate becomes a matmul's input."""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.activate import apply_activation
from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.recurrences.delta_inputs import padded
from realizar.backends.cuda.kernels.reduce import load_sum
from realizar.backends.cuda.kernels.store_inputs import store_block, store_token, store_values


@triton.jit
def gated(
    source, source_at, partials, splits_stride, token_at, bias, gate_at, norm_weight, eps, width, first,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, HEAD: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The columns from `first` on: the source times its gate's activation.

    With NORM, and KIND of a sigmoid, its normed heads times silu(gate).
    """
    columns = first + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(source + source_at + columns, mask=inside, other=0.0)
    gate = load_sum(partials, bias, token_at, gate_at + columns, inside, splits_stride, SPLITS, BIAS)
    factor = apply_activation(gate, KIND)
    if NORM:
        heads = tl.reshape(x, [BLOCK // HEAD, HEAD])
        scale = 1.0 / tl.sqrt(tl.sum(heads * heads, axis=1) / HEAD + eps)
        x = tl.reshape(heads * scale[:, None], [BLOCK]) * tl.load(norm_weight + columns % HEAD)
        factor = factor * gate
    return tl.where(inside, x * factor, 0.0)


@launched
def gate_heads(
    source, source_stride, partials, splits_stride, token_stride, bias, gate_at, norm_weight, eps, width, values,
    value_stride, value_scale, codes, terms, token_tops, token_arrivals,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, HEAD: tl.constexpr, KIND: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate heads and store them in a matmul's format. Grid: tokens, blocks of columns: one block if WHOLE.

    source: float32 [tokens, width]. The gate lies in the partial sums from column `gate_at` on. With NORM, whole heads
    of HEAD columns lie in a block.
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    source_at, at = token * source_stride, token * token_stride
    x = gated(
        source, source_at, partials, splits_stride, at, bias, gate_at, norm_weight, eps, width, first, SPLITS, BIAS,
        NORM, HEAD, KIND, BLOCK,
    )  # fmt: skip
    if WHOLE:
        store_token(
            x, token, width, values, value_stride, value_scale, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK
        )  # fmt: skip
    else:
        factor = store_block(
            x, token, first, width, values, value_stride, value_scale, codes, terms, token_tops, token_arrivals, FORMAT,
            BLOCK_TOKENS, CHUNKS, BLOCK,
        )  # fmt: skip
        if factor != 1.0:
            for block in tl.range(0, tl.num_programs(1)):
                first = block * BLOCK
                x = gated(
                    source, source_at, partials, splits_stride, at, bias, gate_at, norm_weight, eps, width, first,
                    SPLITS, BIAS, NORM, HEAD, KIND, BLOCK,
                )  # fmt: skip
                x = x / factor
                store_values(
                    x, token, first, width, values, value_stride, codes, terms, FORMAT, BLOCK_TOKENS, CHUNKS, BLOCK
                )


@launched
def norm_heads(source, source_stride, weight, eps, HEAD: tl.constexpr, DEPENDENT: tl.constexpr):
    """The heads of `source`, float32 [tokens, heads * HEAD], over their root mean square. Grid: tokens, heads."""
    begin(DEPENDENT)
    features = tl.arange(0, padded(HEAD))
    at = source + tl.program_id(0).to(tl.int64) * source_stride + tl.program_id(1) * HEAD + features
    x = tl.load(at, mask=features < HEAD, other=0.0)
    x = x / tl.sqrt(tl.sum(x * x, axis=0) / HEAD + eps)
    x *= tl.load(weight + features, mask=features < HEAD, other=0.0)
    tl.store(at, x, mask=features < HEAD)


@launched
def keep_inputs(
    partials, splits_stride, token_stride, bias, slots, rings, channels, gate_width,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy tokens' inputs to their rings. Grid: tokens / TOKENS, blocks of columns.

    slots: int32 [tokens], slot * RING + place in it, -1 for tokens that are not kept. The first `channels` columns and
    those after the `gate_width` columns that follow them lie side by side in a ring.
    """
    begin(DEPENDENT)
    first = tl.program_id(0) * TOKENS
    if tl.max(tl.load(slots + first + tl.arange(0, TOKENS)), axis=0) < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    stored = columns + tl.where(columns < channels, 0, gate_width)
    for i in tl.static_range(TOKENS):
        token = first + i
        slot = tl.load(slots + token)
        if slot >= 0:
            at = token.to(tl.int64) * token_stride
            x = load_sum(partials, bias, at, stored, inside, splits_stride, SPLITS, BIAS)
            tl.store(rings + slot.to(tl.int64) * WIDTH + columns, x, mask=inside)
