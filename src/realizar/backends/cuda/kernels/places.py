"""Blocks or snapshots of all planes of a cache, together: to one array and back."""

import triton.language as tl

from realizar.backends.cuda.kernels.launched import launched


@launched(do_not_specialize=["width", "count"])
def move_places(contents, width, lines, count, INTO_CACHE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `contents`, integers [count, width], into places of planes, or those to `contents`.

    `lines`, int64: the places, and then of each plane its address, its integers of a place, and the first of a row of
    `contents` that are its own. Grid: places, planes, blocks of a place of the largest plane.
    """
    row, line = tl.program_id(0).to(tl.int64), lines + count + 3 * tl.program_id(1)
    address, size, first = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    cached = address.to(contents.dtype, bitcast=True) + tl.load(lines + row) * size + at
    joined = contents + row * width + first + at
    if INTO_CACHE:
        tl.store(cached, tl.load(joined, mask=at < size), mask=at < size)
    else:
        tl.store(joined, tl.load(cached, mask=at < size), mask=at < size)
