"""A step's arrays: from the host's memory to the device's, and there from one step to the next."""

import triton.language as tl

from realizar.backends.cuda.kernels.launched import launched


@launched
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


@launched
def fetch_rows(host, stride, device, width, BLOCK: tl.constexpr):
    """device[row] = host[row], float32 rows of `width`; `host` is pinned, with `stride` from row to row.

    Grid: rows, blocks of columns.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(device + row * width + at, tl.load(host + row * stride + at, mask=at < width), mask=at < width)


@launched
def add_rows(header, places, device, width, offset, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """device[row, :width] += what lies `offset` floats behind the address of places[row], float32 in pinned memory.

    `places` are 0 where nothing is added, and there are header[COUNT]. Grid: programs, which share rows; blocks of
    columns.
    """
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), tl.load(header + COUNT), tl.num_programs(0)):
        place = tl.load(places + row)
        if place != 0:
            host = place.to(tl.pointer_type(tl.float32)) + offset
            values = tl.load(host + at, mask=at < width) + tl.load(device + row * width + at, mask=at < width)
            tl.store(device + row * width + at, values, mask=at < width)


@launched
def find_ids(ids, token_rows, last, drafts, rows, tokens, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Ids that the host does not know: -1 is what the row sampled last, FIRST - place the draft there, [places, rows].

    Grid: blocks of tokens.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + at, mask=at < tokens, other=0)
    is_draft, follows = token <= FIRST, token == -1
    row = tl.load(token_rows + at, mask=is_draft | follows, other=0)
    found = tl.load(last + row, mask=follows, other=0)
    found += tl.load(drafts + (FIRST - token) * rows + row, mask=is_draft, other=0)
    tl.store(ids + at, found, mask=is_draft | follows)


@launched(do_not_specialize=["width", "largest"])
def take_sampled(ids, selected, lags, lines, read_ids, tokens, width, largest, BLOCK: tl.constexpr):
    """Write sampled tokens that stand, [rows that sampled, width], into a step, and select the last one of each row.

    `lines` are those of `SampledAhead`; the token before the sampled ones is one of `read_ids`, those of the step that
    sampled. `lags` get the number of a row's tokens behind the selected one. Grid: rows.
    """
    row = tl.program_id(0)
    index, first = tl.load(lines + 5 * row), tl.load(lines + 5 * row + 1)
    room, chosen = tl.load(lines + 5 * row + 2), tl.load(lines + 5 * row + 3)
    before = tl.load(lines + 5 * row + 4)
    known = tl.load(read_ids + before, mask=before >= 0, other=0)
    tl.store(ids + first - 1, tl.minimum(known, largest), mask=before >= 0)
    count = 0
    for begin in tl.range(0, room, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        token = tl.load(tokens + index * width + place, mask=(index >= 0) & (place < room), other=-1)
        count += tl.sum((token >= 0).to(tl.int32), axis=0)
        tl.store(ids + first + place, tl.maximum(tl.minimum(token, largest), 0), mask=place < room)
    last = tl.maximum(count - 1, 0)
    tl.store(selected + chosen, first + last, mask=chosen >= 0)
    tl.store(lags + row, tl.where(chosen >= 0, room - 1 - last, 0))


@launched(do_not_specialize=["width", "largest"])
def begin_blocks(
    header, ids, positions, slots, slots_stride, contexts, decodes, tables, table_rows, begins, lines, tokens, width,
    largest, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks begin behind the sampled tokens that stand, [rows that sampled, width], with the last of these.

    `lines` are those of `BlocksAhead`. Each row of the step is a token of a block; `begins` gets the place of the state
    that its block begins with. Grid: rows.
    """
    row = tl.program_id(0)
    index, most = tl.load(lines + 4 * row), tl.load(lines + 4 * row + 1)
    within, stand = tl.load(lines + 4 * row + 2), 0
    for begin in tl.range(0, most, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        token = tl.load(tokens + index * width + place, mask=place < most, other=-1)
        stand += tl.sum((token >= 0).to(tl.int32), axis=0)
    stand = tl.maximum(stand, 1)
    lag = most - stand
    last = tl.load(tokens + index * width + stand - 1)
    tl.store(ids + row, tl.maximum(tl.minimum(last, largest), 0), mask=within == 0)
    tl.store(begins + row, tl.load(lines + 4 * row + 3) - lag)
    position, context = tl.load(positions + row) - lag, tl.load(contexts + row) - lag
    tl.store(positions + row, position)
    tl.store(contexts + row, context)
    tl.store(decodes + 4 * row + 2, context)
    tl.store(decodes + 4 * row + 3, position)
    stride = tl.load(header)
    for group in tl.static_range(GROUPS):
        block = tl.load(tables + (group * table_rows + row) * stride + position // BLOCK_SIZE)
        tl.store(slots + group * slots_stride + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
