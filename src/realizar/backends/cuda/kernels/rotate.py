"""QK norm per head, rope, and keys and values into the cache, for the tokens of chunks."""

import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.heads import rotated_heads, store_heads
from realizar.backends.cuda.kernels.launched import launched


@launched
def rotate(
    partials, splits_stride, token_stride, bias, positions, cosine, sine, query_scales, query_norm, key_norm,
    query_norm_bias, key_norm_bias, eps, value_eps, key_at, value_at, keys, values, key_scales, value_scales, slots,
    query, query_stride,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr,
    VALUE_NORM: tl.constexpr, GROWTH: tl.constexpr, STORED: tl.constexpr, PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, INT8: tl.constexpr, DEPENDENT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """PARTS heads of one token: queries, then keys, then values; see `rotated_heads`. Grid: tokens, blocks of heads.

    A slot of -1 (a padded token) writes nothing to the cache. STORED: it has keys and values already, and there are
    queries alone.
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = (tl.program_id(1) * PARTS + tl.arange(0, PARTS))[:, None]
    dims = tl.arange(0, PADDED_HEAD)[None, :]
    own = part < (HEADS if STORED else HEADS + 2 * KV_HEADS)
    x, columns = rotated_heads(
        partials, splits_stride, token_stride, bias, positions, cosine, sine, query_scales, query_norm, key_norm,
        query_norm_bias, key_norm_bias, eps, value_eps, key_at, value_at, token, part, own, dims, SPLITS, BIAS, HEADS,
        KV_HEADS, HEAD, ROTARY, INTERLEAVED, NORM, NORM_BIAS, VALUE_NORM, GROWTH,
    )  # fmt: skip
    is_query, is_value = part < HEADS, part >= HEADS + KV_HEADS
    tl.store(query + token * query_stride + columns, x, mask=is_query & (dims < HEAD))
    if not STORED:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = part - tl.where(is_value, HEADS + KV_HEADS, HEADS)
            store_heads(
                x, keys, values, key_scales, value_scales, slot, head, own & ~is_query & ~is_value, own & is_value,
                dims, KV_HEADS, HEAD, PADDED_HEAD, BLOCK_SIZE, INT8, PARTS,
            )  # fmt: skip
