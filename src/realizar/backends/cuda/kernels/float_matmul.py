"""A matmul with float weights as they are stored, in tiles that do not depend on the number of tokens."""

import triton
import triton.language as tl


@triton.jit
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
