"""The end of a shared expert: its output is added to that of a token's last expert."""

import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.normalize import norm_token
from realizar.backends.cuda.kernels.reduce import load_sum


@launched
def add_shared(
    partials, splits_stride, token_stride, bias, out, out_stride, hidden, hidden_stride, norm_weight, norm_bias, eps,
    gate, gate_bias, width,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, GATE_BIAS: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out += sum of partials, times sigmoid(gate . norm(hidden)) where GATED. Grid: tokens.

    `width` is that of the stream; `gate` float32 [width], `gate_bias` [1]. NORM: as in `norm_token`.
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = load_sum(partials, bias, token * token_stride, columns, inside, splits_stride, SPLITS, BIAS)
    if GATED:
        normed = tl.load(hidden + token * hidden_stride + columns, mask=inside, other=0.0)
        normed = norm_token(normed, inside, width, norm_weight, norm_bias, columns, eps, NORM, NORM_BIAS)
        logit = tl.sum(normed * tl.load(gate + columns, mask=inside, other=0.0), axis=0)
        if GATE_BIAS:
            logit += tl.load(gate_bias)
        power = tl.exp(-tl.abs(logit))
        x *= tl.where(logit < 0.0, power, 1.0) / (1.0 + power)
    at = out + token * out_stride + columns
    tl.store(at, tl.load(at, mask=inside, other=0.0) + x, mask=inside)
