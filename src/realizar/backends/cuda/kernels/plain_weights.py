"""Reading quantised weights in the layout of `weights.plain`, which the embedding and the Triton matmul share."""

import triton
import triton.language as tl


@triton.jit
def load_codes(plane, at, columns, mask, WIDTH: tl.constexpr):
    """Codes of WIDTH bits, packed into bytes from the lowest bit on; `at` are the byte offsets of the out_features."""
    place = at + (columns * WIDTH // 8)[None, :]
    byte = tl.load(plane + place, mask=mask, other=0).to(tl.int32)
    return (byte >> (columns * WIDTH % 8)[None, :]) & ((1 << WIDTH) - 1)


@triton.jit
def load_weights(
    low, high, small, small_minima, supers, super_minima, codebook, signs, out_features, columns, cols, feature_mask,
    LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    MINIMA: tl.constexpr, VECTOR: tl.constexpr, CODEBOOK: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """float32 [out_features, columns] of a matrix of `cols` columns; 0 beyond its edges.

    The out_features of an embedding are its token ids. VECTOR above 1: `low` has uint16 indices of codebook entries of
    VECTOR weights.
    """
    mask = feature_mask[:, None] & (columns < cols)[None, :]
    feature = out_features.to(tl.int64)[:, None]
    if VECTOR > 1:
        index = tl.load(low + feature * (cols // VECTOR) + (columns // VECTOR)[None, :], mask=mask, other=0).to(
            tl.int32
        )
        values = tl.load(codebook + index * VECTOR + (columns % VECTOR)[None, :], mask=mask, other=0).to(tl.float32)
    else:
        code = load_codes(low, feature * (cols * LOW // 8), columns, mask, LOW)
        if HIGH > 0:
            code += load_codes(high, feature * (cols * HIGH // 8), columns, mask, HIGH) << LOW
        if CODEBOOK:
            values = tl.load(codebook + code, mask=mask, other=0).to(tl.float32)
        else:
            values = (code - OFFSET).to(tl.float32)
    if SIGNS:
        negative = load_codes(signs, feature * (cols // 8), columns, mask, 1)
        values = tl.where(negative == 1, -values, values)
    group = feature * (cols // GROUP) + (columns // GROUP)[None, :]
    scale = tl.load(small + group, mask=mask, other=0).to(tl.float32)
    if SUPER > 0:
        larger = feature * (cols // SUPER) + (columns // SUPER)[None, :]
        scale *= tl.load(supers + larger, mask=mask, other=0.0).to(tl.float32)
    values *= scale
    if MINIMA:
        minimum = tl.load(small_minima + group, mask=mask, other=0).to(tl.float32)
        if SUPER > 0:
            minimum *= tl.load(super_minima + larger, mask=mask, other=0.0).to(tl.float32)
        values += minimum
    return values
