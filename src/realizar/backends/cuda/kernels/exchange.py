"""Sums over ranks with a GPU each, whose kernels write parts into each other's memory.

A place there is free while it holds one bit pattern, a NaN that no arithmetic makes. So words need no flags beside them
and no barrier: who waits for one reads its own memory until it has come, and frees the place at once. Two exchanges
that follow each other have other places: a rank that is at the second one has all words of the first, so that
whoever sent them has freed the places of the one before, to which the third may write.

A wait ends when all is there, after so many turns, or when a word of the host says that the ranks are broken off, which
a wait that has taken too long says as well.
"""

import triton
import triton.language as tl

from realizar.backends.cuda.kernels.dependent import begin
from realizar.backends.cuda.kernels.launched import launched
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR, load_sum

FREE = tl.constexpr(-1)
RANK, PATIENCE = tl.constexpr(0), tl.constexpr(1)
"""Places of `state`: this rank; turns of a wait, at most."""
_LOOK_EVERY = tl.constexpr(1024)  # turns after which a wait reads the host's word


@triton.jit
def as_words(x, HALVES: tl.constexpr):
    """float32 as words of 32 bits, or as float16 divided by `HALF_FACTOR`; none is `FREE`."""
    if HALVES:
        words = (x * (1.0 / HALF_FACTOR)).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        words = x.to(tl.int32, bitcast=True)
    return words - (words == FREE).to(words.dtype)  # another NaN


@triton.jit
def as_floats(words):
    if words.dtype == tl.int16:
        values = words.to(tl.float16, bitcast=True).to(tl.float32) * HALF_FACTOR
    else:
        values = words.to(tl.float32, bitcast=True)
    return values


@triton.jit
def send(words, at, mask, addresses, FIRST: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """Write words to the memory at each of COUNT addresses; `at` counts words, ALIGNED divides the addresses."""
    for place in tl.static_range(FIRST, FIRST + COUNT):
        base = tl.load(addresses + place).to(tl.pointer_type(words.dtype))
        tl.store(tl.multiple_of(base, ALIGNED) + at, words, mask=mask)


@triton.jit
def receive(own, rank, at, mask, exchange, MINE: tl.constexpr, RANKS: tl.constexpr, HALVES: tl.constexpr):
    """The sum over ranks, in their order, of which this one's is `own`; others' words lie in this rank's memory.

    A rank beyond the last has none of its own. MINE: of the memory's address.
    """
    addresses, state, stride = exchange
    WORD: tl.constexpr = tl.int16 if HALVES else tl.int32
    mine = tl.multiple_of(tl.load(addresses + MINE).to(tl.pointer_type(WORD)), 16) + at
    broken = tl.load(addresses + MINE + 1).to(tl.pointer_type(tl.int32))
    left, total = tl.load(state + PATIENCE), own
    while left > 0:
        missing = tl.zeros_like(at).to(tl.int32)
        for sender in tl.static_range(RANKS):
            place = mine + tl.where(rank < sender, sender - 1, sender) * stride
            words = tl.load(place, mask=mask & (rank != sender), other=0, volatile=True)
            missing |= (words == FREE).to(tl.int32)
            part = tl.where(rank == sender, own, as_floats(words))
            total = part if sender == 0 else total + part
        left -= 1
        if left % _LOOK_EVERY == 0:
            left = tl.where(tl.load(broken, volatile=True) == 0, left, 0)
        left = tl.where(tl.max(missing, axis=0) > 0, left, -1)
    if left == 0:
        tl.store(broken, 1)
    for sender in tl.static_range(RANKS):
        place = mine + tl.where(rank < sender, sender - 1, sender) * stride
        tl.store(place, tl.zeros_like(at).to(WORD) + FREE, mask=mask & (rank != sender))
    return total


@triton.jit
def load_rank_sum(
    partials, bias, token_at, columns, mask, splits_stride, at, exchange,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, RANKS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """float32 of one token: the sum of a matmul's splits, plus the bias, and with RANKS over all of them.

    With RANKS of 0 it is this rank's alone. With 1 the sum over ranks has been sent: partials are not read. `exchange`:
    addresses, state, and the words from a sender's place to the next; addresses are those of other ranks' memory, then
    of this one's, and of the host's word, which is not 0 where ranks are broken off. `at`: the columns among a sender's
    words.
    """
    if RANKS == 1:
        total = receive(tl.zeros_like(at).to(tl.float32), 1, at, mask, exchange, 0, 1, HALVES)
    else:
        total = load_sum(partials, bias, token_at, columns, mask, splits_stride, SPLITS, BIAS)
        if RANKS > 1:
            words = as_words(total, HALVES)
            send(words, at, mask, exchange[0], 0, RANKS - 1, 16)
            rank = tl.load(exchange[1] + RANK)
            total = receive(as_floats(words), rank, at, mask, exchange, RANKS - 1, RANKS, HALVES)
    return total


@launched
def add_up_sums(
    partials, splits_stride, token_stride, bias, totals, width, exchange,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, RANKS: tl.constexpr, HALVES: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """totals [tokens, width] = the sum over splits and ranks, float32, of `load_rank_sum`. Grid: tokens, blocks."""
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = columns < width, token * width + columns
    total = load_rank_sum(
        partials, bias, token * token_stride, columns, inside, splits_stride, at, exchange, SPLITS, BIAS, RANKS, HALVES
    )
    tl.store(totals + at, total, mask=inside)


@launched
def send_sums(
    partials, splits_stride, token_stride, bias, width, addresses, row_width,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Send this rank's columns of each token to all ranks, to this one too. Grid: tokens, blocks.

    `row_width`: of all ranks; `addresses` are those of this rank's columns.
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = load_sum(partials, bias, token * token_stride, columns, inside, splits_stride, SPLITS, BIAS)
    send(as_words(total, False), token * row_width + columns, inside, addresses, 0, RANKS, 4)


@launched
def share_sums(
    partials, splits_stride, token_stride, bias, width, parts, totals,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, RANKS: tl.constexpr, HALVES: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Send each token's sum to the rank that adds it up, which sends the total to all. Grid: tokens, blocks.

    Ranks take tokens by turns. `parts`: the exchange of parts, with all ranks' addresses, then this one's; `totals`:
    addresses of totals, of all ranks. A `load_rank_sum` with RANKS of 1 reads them.
    """
    begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    words = as_words(
        load_sum(partials, bias, token * token_stride, columns, inside, splits_stride, SPLITS, BIAS), HALVES
    )
    rank, adds = tl.load(parts[1] + RANK), (token % RANKS).to(tl.int32)
    at = token // RANKS * width + columns
    if adds == rank:
        total = receive(as_floats(words), rank, at, inside, parts, RANKS, RANKS, HALVES)
        send(as_words(total, HALVES), token * width + columns, inside, totals, 0, RANKS, 16)
    else:
        send(words, at, inside, parts[0] + adds, 0, 1, 16)
