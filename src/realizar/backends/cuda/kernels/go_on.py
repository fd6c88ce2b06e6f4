"""From one step of a drafter to the next, and from the model's to the drafter's: kernels of `inputs/draft_chain.py`."""

import triton.language as tl

from realizar.backends.cuda.kernels.launched import launched

CHAIN_HEADER, CHAIN_LINES = 4, 3
"""Numbers before those of rows: drafts that each row has by now, rows, and rows of the padded step; and those of each
row, one kind after the other: its number in the model, the drafts that it wants, its index among the sampled tokens."""
_HEADER = tl.constexpr(CHAIN_HEADER)


@launched
def gather_states(kept, own, sources, states, width, BLOCK: tl.constexpr):
    """states[token] = own[source], or kept[~source] where it is below 0; rows of `width`. Grid: tokens, blocks."""
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + token).to(tl.int64)
    inside = column < width
    of_own = tl.load(own + source * width + column, mask=inside & (source >= 0), other=0.0)
    of_kept = tl.load(kept + (-1 - source) * width + column, mask=inside & (source < 0), other=0.0)
    tl.store(states + token * width + column, of_own + of_kept, mask=inside)


@launched
def keep_states(kept, own, places, width, BLOCK: tl.constexpr):
    """kept[place] = own[token] for either of two places that is not below 0, [tokens, 2]. Grid: tokens, blocks."""
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.load(places + 2 * token).to(tl.int64), tl.load(places + 2 * token + 1).to(tl.int64)
    inside = column < width
    values = tl.load(own + token * width + column, mask=inside & ((first >= 0) | (second >= 0)), other=0.0)
    tl.store(kept + first * width + column, values, mask=inside & (first >= 0))
    tl.store(kept + second * width + column, values, mask=inside & (second >= 0))


@launched
def take_states(lines, source, selected, states, width, ROWS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """What each row reads beside its next token: the state of the one that it sampled after, [tokens, width].

    KEPT: `source` has those of all tokens of the step, and not those of `selected` ones alone. Grid: ROWS, blocks.
    """
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(lines + 1):
        token = tl.load(lines + _HEADER + 2 * ROWS + row)
        if KEPT:
            token = tl.load(selected + token)
        values = tl.load(source + token.to(tl.int64) * width + column, mask=column < width, other=0.0)
        tl.store(states + row * width + column, values, mask=column < width)


@launched
def go_on(
    lines, sampled, drafts, drafts_stride, largest, header, ids, token_rows, positions, angles, shifts, slots,
    slots_stride, starts, counts, contexts, lags, decodes, selected, selected_rows, tables,
    ROWS: tl.constexpr, MOVES: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep what rows sampled as their drafts; the step's arrays become those in which they decode it.

    Rows that want no more have nothing in it. A row's angle is `shifts`, by its number, beyond its position. Without
    MOVES, of a step whose rows see the tokens before their own alone, rows stay where they are. Grid: 1, of one warp,
    since what it reads of `lines` it writes.
    """
    row = tl.arange(0, BLOCK)
    place, rows, padded = tl.load(lines), tl.load(lines + 1), tl.load(lines + 2)
    live, inside = row < rows, row < padded
    number = tl.load(lines + _HEADER + row, mask=live, other=0)
    wanted = tl.load(lines + _HEADER + ROWS + row, mask=live, other=0)
    chosen = tl.load(lines + _HEADER + 2 * ROWS + row, mask=live, other=0)
    kept = live & (wanted > place)
    token = tl.load(sampled + chosen, mask=kept, other=0)
    tl.store(drafts + place * drafts_stride + number, tl.maximum(tl.minimum(token, largest), 0), mask=kept)
    alive = live & (wanted > place + 1)
    position = tl.load(contexts + row, mask=live, other=0) - tl.load(lags + row, mask=live, other=0)
    tl.store(lags + row, 0, mask=live)
    stride = tl.load(header)
    for group in tl.static_range(GROUPS):
        table = tables + group * ROWS * stride + row * stride
        block = tl.load(table + position // BLOCK_SIZE, mask=alive, other=0)
        slot = tl.where(alive, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slots + group * slots_stride + row, slot, mask=inside)
    tl.store(ids + row, tl.where(alive, -1, 0), mask=inside)
    tl.store(token_rows + row, number, mask=inside)
    angle = position + tl.load(shifts + number, mask=alive, other=0)
    tl.store(positions + row, position, mask=inside)
    tl.store(angles + row, angle, mask=inside)  # where there is one axis these are the positions
    tl.store(starts + row, row, mask=live)
    tl.store(counts + row, 1, mask=live)
    context = position + 1 if MOVES else position
    tl.store(contexts + row, context, mask=live)
    tl.store(decodes + 4 * row, tl.where(alive, row, -1), mask=inside)
    tl.store(decodes + 4 * row + 1, tl.where(alive, row, -1), mask=inside)
    tl.store(decodes + 4 * row + 2, tl.where(alive, context, -1), mask=inside)
    tl.store(decodes + 4 * row + 3, tl.where(alive, angle, -1), mask=inside)
    tl.store(selected + row, row, mask=live)
    tl.store(selected_rows + row, tl.where(alive, number, -1), mask=live)
    one = row == 0
    tl.store(header + 1 + row, rows, mask=one)
    tl.store(lines + row, place + 1, mask=one)
    tl.store(lines + _HEADER + 2 * ROWS + row, row, mask=live)
