"""A step's arrays: from the host's memory to the device's, and there from one step to the next."""

import triton
import triton.language as tl


@triton.jit
def fetch(host, device, COUNT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """device[:count] = host[:count] in int32, `host` pinned, `count` being host[COUNT], and of WHOLE blocks at least.

    Grid: WHOLE programs of a block each, which wait for no count, and some that share the other blocks.

    The copy engine is as fast, but what comes after it starts later: an 8B model took 1.5835 ms a step with it, 1.580
    so.
    """
    program = tl.program_id(0)
    if program < WHOLE:
        at = program * BLOCK + tl.arange(0, BLOCK)
        tl.store(device + at, tl.load(host + at))
    else:
        count, stride = tl.load(host + COUNT), tl.num_programs(0) - WHOLE
        for turn in range(tl.cdiv(tl.cdiv(count, BLOCK) - program, stride)):
            at = (program + turn * stride) * BLOCK + tl.arange(0, BLOCK)
            tl.store(device + at, tl.load(host + at, mask=at < count, other=0), mask=at < count)


@triton.jit(do_not_specialize=["rows", "padded"])
def go_on(
    header, ids, token_rows, positions, slots, slots_stride, starts, counts, contexts, decodes, selected, selected_rows,
    tables, table_rows, rows, padded, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The arrays of a step all of whose rows sampled become those of one that decodes what they sampled. Grid: 1."""
    row = tl.arange(0, BLOCK)
    live, inside = row < rows, row < padded
    position = tl.load(contexts + row, mask=live, other=0)
    stride = tl.load(header)
    for group in tl.static_range(GROUPS):
        table = tables + group * table_rows * stride + row * stride
        block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0)
        slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slots + group * slots_stride + row, slot, mask=inside)
    tl.store(ids + row, tl.where(live, -1, 0), mask=inside)
    tl.store(token_rows + row, tl.load(selected_rows + row, mask=live, other=0), mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(starts + row, row, mask=live)
    tl.store(counts + row, 1, mask=live)
    tl.store(contexts + row, position + 1, mask=live)
    tl.store(decodes + 4 * row, tl.where(live, row, -1), mask=inside)
    tl.store(decodes + 4 * row + 1, tl.where(live, row, -1), mask=inside)
    tl.store(decodes + 4 * row + 2, tl.where(live, position + 1, -1), mask=inside)
    tl.store(decodes + 4 * row + 3, tl.where(live, position, -1), mask=inside)
    tl.store(selected + row, row, mask=live)
    tl.store(header + 1 + row, rows, mask=row == 0)
