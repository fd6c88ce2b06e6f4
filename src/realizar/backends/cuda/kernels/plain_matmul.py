"""The matmuls of Triton: with quantised weights, for GPUs that cannot run the CUDA C++ kernels, and with floats.

Float weights are read as they are stored, in tiles that do not depend on the number of tokens.
"""

import triton.language as tl

from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.plain_weights import load_weights


@launched
def multiply(
    x, x_stride, x_scale, out, out_split, out_token, out_features, cols, num_tokens, low, high, small, small_minima,
    supers, super_minima, codebook, signs,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    MINIMA: tl.constexpr, VECTOR: tl.constexpr, CODEBOOK: tl.constexpr, SIGNS: tl.constexpr, SPLITS: tl.constexpr,
    COMPUTE: tl.constexpr, TOKENS: tl.constexpr, OUT_FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [splits, tokens, out_features] = x [tokens, cols] @ matrix.T. Grid: blocks of both, splits.

    `x_scale` [tokens] is the divisor of each token.
    """
    out_feature = tl.program_id(0) * OUT_FEATURES + tl.arange(0, OUT_FEATURES)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    blocks = (cols + COLUMNS - 1) // COLUMNS
    each = (blocks + SPLITS - 1) // SPLITS
    count = tl.maximum(tl.minimum(blocks - split * each, each), 0)
    sums = tl.zeros([TOKENS, OUT_FEATURES], tl.float32)
    here = (token < num_tokens)[:, None]
    for i in tl.range(0, count):
        column = (split * each + i) * COLUMNS + tl.arange(0, COLUMNS)
        w = load_weights(
            low, high, small, small_minima, supers, super_minima, codebook, signs, out_feature, column, cols,
            out_feature < out_features, LOW, HIGH, OFFSET, GROUP, SUPER, MINIMA, VECTOR, CODEBOOK, SIGNS,
        )  # fmt: skip
        at = token.to(tl.int64)[:, None] * x_stride + column[None, :]
        a = tl.load(x + at, mask=here & (column < cols)[None, :], other=0.0)
        sums += tl.dot(a.to(COMPUTE), tl.trans(w).to(COMPUTE), input_precision="ieee")
    sums *= tl.load(x_scale + token, mask=token < num_tokens, other=0.0)[:, None]
    place = out + split * out_split + token.to(tl.int64)[:, None] * out_token + out_feature[None, :]
    tl.store(place, sums, mask=here & (out_feature < out_features)[None, :])


@launched
def multiply_floats(
    x, x_stride, x_scale, weights, out, out_stride, out_features, cols, tokens,
    COMPUTE: tl.constexpr, TOKENS: tl.constexpr, OUT_FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """float32 out [tokens, out_features] = x @ weights.T * x_scale. Grid: tiles of output features, tiles of tokens.

    A token's sums go over the columns in one order, whatever the number of tokens.
    """
    features = tl.program_id(0) * OUT_FEATURES + tl.arange(0, OUT_FEATURES)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    has_feature, has_token = features < out_features, token < tokens
    sums = tl.zeros([TOKENS, OUT_FEATURES], tl.float32)
    for i in tl.range(0, (cols + COLUMNS - 1) // COLUMNS):
        columns = i * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < cols
        values = tl.load(
            x + token[:, None] * x_stride + columns[None, :], mask=has_token[:, None] & inside[None, :], other=0.0
        )
        block = tl.load(
            weights + features.to(tl.int64)[:, None] * cols + columns[None, :],
            mask=has_feature[:, None] & inside[None, :],
            other=0.0,
        )
        sums += tl.dot(values.to(COMPUTE), tl.trans(block.to(COMPUTE)), input_precision="ieee")
    scale = tl.load(x_scale + token, mask=has_token, other=0.0)
    at = out + token[:, None] * out_stride + features[None, :]
    tl.store(at, sums * scale[:, None], mask=has_token[:, None] & has_feature[None, :])
