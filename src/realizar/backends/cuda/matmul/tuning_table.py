"""Tiles and splits of a matmul: from measured tables per GPU, or by rule where there is no table. torch-free.

A table is JSON in `tables/`, a list of lines as `Line.to_json` writes them: the fastest tiles and splits for a number
of tokens and a shape. After them come those of matmuls over experts, as `ExpertLine.to_json` writes them. A
matmul takes the line of its number of tokens and the nearest shape; splits are then scaled so that as many blocks run,
and stages cut where another weight format's blocks are too large for shared memory. Lines that count alone are for
their own shape, so that a shape can be measured without a look at all others.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from realizar.backends.cuda.layouts.fragments import TILE, FragmentFormat
from realizar.backends.cuda.native.grouped.source import AnyTiles, DirectTiles, GroupedTiles
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, Tiles, WgmmaTiles
from realizar.hub.folders import user_data
from realizar.models.spec import Experts

_LOG = logging.getLogger(__name__)

_KINDS: dict[str, type[Tiles]] = {"matvec": MatvecTiles, "wgmma": WgmmaTiles, "mma_sync": MmaSyncTiles}
_TABLES = {"H200": "h200.json", "H100": "h200.json", "GH200": "h200.json"}
BLOCK_TOKENS = (8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 224)
"""Rows that a block of `half` activations may have; other cards than Hopper's have 8 to 64, and 128."""
FEW_TOKENS, MANY_TOKENS = 64, 128  # of a block, up to which every card has it; of each block of a larger step
_LONG_TOKENS = 1024  # of a step, from which on splits go by rounds of blocks
_MOST_LONG_SPLITS, _LEAST_CHUNKS = 4, 16  # of a matmul of a long step; of a split
_AREA_MS = 2.4e-8  # a multiprocessor of an H200 takes for a chunk of an output
_SPLIT_BYTES_PER_MS = 2e9  # at which sums of long steps are written and read; with 3.2e9 slower splits won
_CONSUMER_BYTES_PER_MS = 2.5e9  # at which the next kernel reads partial sums
_MOST_WARPS, _MOST_PARTS = 16, 6  # that share a tile's columns in the mat-vec, and with the gated epilogue
_MANY_TILES = 30  # of a multiprocessor, from which on a block takes a whole strip
_MOST_UNROLLED = 9  # blocks of two warps for one token, each of which has registers for one chunk more
_LEAST_FILLED = 2 / 3  # of the multiprocessors, by a matmul that can't be split
_LEAST_WHOLE = 0.7  # of those, by a mat-vec that is not split: a norm's launch costs more than processors left idle
_STAYING_STAGES = 6  # at most, of tiles whose blocks stay in long steps
_WHOLE = 1, 2, 3, 2, 1  # strips, groups, stages, step and blocks of a tile of more tokens than MANY_TOKENS
_DEFAULT_SHARED_BYTES = 99 * 1024  # of a block, on the smallest device that the tensor-core kernels run on


def most_tokens(block_tokens: int) -> int | None:
    """Tokens of the largest step with blocks of a size that Hopper alone has; None of other sizes."""
    return block_tokens if block_tokens > FEW_TOKENS and block_tokens != MANY_TOKENS else None


@dataclass(frozen=True, slots=True)
class Tiling:
    tiles: Tiles
    splits: int


@dataclass(frozen=True, slots=True)
class Line:
    """A measured matmul.

    Attributes:
        tokens: of the step. out_features, cols: shape of the weights.
        tiles, splits: how it ran. ms: how long, of one launch in a graph of many.
        alone: whether it counts for its own shape alone; others are for the nearest shapes too.
    """

    tokens: int
    out_features: int
    cols: int
    tiles: Tiles
    splits: int
    ms: float
    alone: bool = False

    def to_json(self) -> list[Any]:
        """[tokens, out_features, cols, kind, the tiles' numbers, splits, ms], and then "alone".

        Of the Hopper kernel's tiles without turns and parts, and that do not stay.
        """
        names = [field.name for field in fields(self.tiles) if field.name not in ("kind", "turns", "summed", "stays")]
        numbers = [getattr(self.tiles, name) for name in names]
        values = [self.tokens, self.out_features, self.cols, self.tiles.kind, numbers, self.splits, round(self.ms, 5)]
        return [*values, "alone"] if self.alone else values

    @staticmethod
    def from_json(values: Sequence[Any]) -> Line:
        tokens, out_features, cols, kind, numbers, splits, ms, *marks = values
        return Line(tokens, out_features, cols, _KINDS[kind](*numbers), splits, ms, marks == ["alone"])

    def is_for(self, out_features: int, cols: int) -> bool:
        return not self.alone or (self.out_features, self.cols) == (out_features, cols)

    @property
    def work(self) -> str:
        return f"{self.out_features} x {self.cols}, {self.tokens} tokens"

    @property
    def key(self) -> tuple[int, int, int, bool, bool]:
        """A table has one line for each key: tokens, shape, True if activations are integers, and `alone`."""
        return self.tokens, self.out_features, self.cols, self.tiles.kind == "matvec", self.alone

    @property
    def cost(self) -> float:
        """Milliseconds with the reading of the partial sums by the kernel after it."""
        return self.ms + 4.0 * self.splits * self.tokens * self.out_features / _CONSUMER_BYTES_PER_MS


def best_lines(lines: Iterable[Line]) -> list[Line]:
    """The cheapest line of each number of tokens, shape and kind of activations, in order."""
    best: dict[tuple[int, int, int, bool, bool], Line] = {}
    for line in lines:
        if line.key not in best or line.cost < best[line.key].cost:
            best[line.key] = line
    return [best[key] for key in sorted(best)]


def updated_lines(old: Iterable[Line], new: Iterable[Line]) -> list[Line]:
    """A table in which new lines replace the old ones of the same matmuls."""
    best = best_lines(new)
    matmuls = {line.key[:-1] for line in best}
    return best_lines([*best, *(line for line in old if line.key[:-1] not in matmuls)])


@dataclass(frozen=True, slots=True)
class Table:
    """Measured lines: of matmuls, and of those over experts."""

    lines: tuple[Line, ...] = ()
    expert_lines: tuple[ExpertLine, ...] = ()

    @staticmethod
    def parse(text: str) -> Table:
        """A table as `write_table` writes it; ValueError, TypeError or KeyError where it is none."""
        rows = json.loads(text)
        of_experts = tuple(ExpertLine.from_json(values) for values in rows if ExpertLine.is_line(values))
        return Table(tuple(Line.from_json(values) for values in rows if not ExpertLine.is_line(values)), of_experts)


@dataclass(frozen=True, slots=True)
class DeviceTuning:
    """The tilings of one device.

    Attributes:
        wgmma: whether the Hopper kernel runs.
        processors: multiprocessors. shared_bytes: shared memory that one block may have.
        lines: the table, empty where there is none. expert_lines: its lines of experts.
        int8_tokens: the largest number of tokens for the integer mat-vec.
    """

    wgmma: bool
    processors: int
    shared_bytes: int = _DEFAULT_SHARED_BYTES
    lines: tuple[Line, ...] = ()
    int8_tokens: int = 2
    expert_lines: tuple[ExpertLine, ...] = ()

    def grouped_lines(self, *, in_order: bool) -> tuple[ExpertLine, ...]:
        """Of grouped matmuls whose instruction runs; `in_order` leaves out kernels with orders of their own."""
        return self._of_kinds("wgmma" if self.wgmma else "mma_sync", *(() if in_order else ("direct",)))

    @property
    def pair_lines(self) -> tuple[ExpertLine, ...]:
        return self._of_kinds("matvec")

    def _of_kinds(self, *kinds: str) -> tuple[ExpertLine, ...]:
        return tuple(line for line in self.expert_lines if line.tiles.kind in kinds)

    def block_tokens(self, tokens: int) -> int:
        """Rows of a block of `half` activations: the smallest that holds a step, where one does."""
        if tokens > (BLOCK_TOKENS[-1] if self.wgmma else FEW_TOKENS):
            return MANY_TOKENS
        return next(size for size in BLOCK_TOKENS if tokens <= size)

    def few_tokens(self, tokens: int, out_features: int, cols: int, weight_format: FragmentFormat) -> Tiling:
        """The mat-vec's tiling. A table's line counts for its own number of tokens, if it keeps columns whole."""
        line = self._nearest(tokens, out_features, cols, {"matvec"})
        if line is not None and line.tokens == tokens:
            measured = self._fitted(replace(line.tiles, tokens=tokens), line, tokens, out_features, weight_format, cols)
            if measured.splits == 1 or not self.keeps_columns(out_features):
                return measured
        tiles, chunks = -(-out_features // TILE), weight_format.chunks(cols)
        warps, unroll = _warps_and_unroll(tokens)
        if tiles > _MANY_TILES * self.processors:
            strips = (
                MatvecTiles(1, 4, min(4, chunks), 1, 2)
                if tokens == 1
                else MatvecTiles(tokens, 4, 1, unroll, warps // 4)
            )
            return Tiling(strips, 1)
        filling = 1 if self.keeps_columns(out_features) else math.ceil(self.processors * _LEAST_FILLED / tiles)
        splits = max(1, min(filling, chunks // 2))
        at_once = -(-tiles * splits // self.processors)
        parts = max(1, min(warps // at_once, _MOST_WARPS, chunks // (2 * splits)))
        return Tiling(MatvecTiles(tokens, 1, parts, unroll, max(1, warps // parts)), splits)

    def keeps_columns(self, out_features: int) -> bool:
        """True if the mat-vec's tiles fill enough of the device without splits, for the residual-add epilogue."""
        return -(-out_features // TILE) >= self.processors * _LEAST_FILLED * _LEAST_WHOLE

    def many_tokens(
        self, tokens: int, out_features: int, cols: int, weight_format: FragmentFormat, sum_bytes: int = 4
    ) -> Tiling:
        """The tensor cores' tiling; `sum_bytes`: of a partial sum in long steps."""
        chunks, block_tokens = weight_format.chunks(cols), self.block_tokens(tokens)
        line = self._nearest(tokens, out_features, cols, {"wgmma", "mma_sync"} if self.wgmma else {"mma_sync"})
        if line is not None and _is_of(line.tiles, block_tokens):
            return self._fitted(
                replace(line.tiles, tokens=block_tokens), line, tokens, out_features, weight_format, cols, sum_bytes
            )
        if not self.wgmma:
            tiles: Tiles = MmaSyncTiles(block_tokens, 2, 4, 1)
        elif block_tokens > MANY_TOKENS:
            tiles = WgmmaTiles(block_tokens, *_WHOLE)
        elif block_tokens <= FEW_TOKENS:
            tiles = WgmmaTiles(block_tokens, 1, 2, 6, 1, 1)
        else:
            tiles = WgmmaTiles(block_tokens, 1, 2, 4, 1, 1)
        blocks = tiles.grid(out_features, 1, -(-tokens // block_tokens))[0] * -(-tokens // block_tokens)
        splits = max(1, min(self.processors // blocks, chunks // 8))
        return Tiling(self.shrunk(tiles, [weight_format]), splits)

    def gated_few(self, tokens: int, out_features: int, cols: int, weight_format: FragmentFormat) -> MatvecTiles | None:
        """Tiles of a mat-vec with the gated epilogue: one of gate and one of up, with all columns, in a block.

        All blocks run at once. None where the matmul fills too little of the device.
        """
        blocks = -(-out_features // (2 * TILE))
        if blocks < self.processors * _LEAST_FILLED:
            return None
        at_once, (warps, unroll) = -(-blocks // self.processors), _warps_and_unroll(tokens)
        parts = max(1, min(round(warps / (2 * at_once)), _MOST_PARTS, weight_format.chunks(cols) // 2))
        if tokens == 1 and parts == 1 and at_once <= _MOST_UNROLLED:
            return MatvecTiles(1, 2, 1, unroll + 1, at_once)
        return MatvecTiles(tokens, 2, parts, unroll, max(at_once, warps // (2 * parts)))

    def gated(self, tokens: int, out_features: int, cols: int, weight_format: FragmentFormat) -> WgmmaTiles | None:
        """Tiles of a Hopper matmul with the gated epilogue: whole sums, gate and up in a warpgroup or a pair of them.

        None where the Hopper kernel does not run, or where the matmul fills too little of the device without splits.
        """
        block_tokens, least = self.block_tokens(tokens), self.processors * _LEAST_FILLED
        tiles = self._nearest_gated(tokens, out_features, cols)
        if tiles is None or not _is_of(tiles, block_tokens):
            tiles = WgmmaTiles(block_tokens, *(_WHOLE if block_tokens > MANY_TOKENS else (2, 2, 4, 1, 1)))
        tiles, token_blocks = replace(tiles, tokens=block_tokens), -(-tokens // block_tokens)
        blocks = tiles.grid(out_features, 1, 1)[0] * token_blocks
        if blocks < least and tiles.strips == tiles.groups == 2:
            tiles = replace(tiles, groups=1, stages=2 * tiles.stages)
            blocks = tiles.grid(out_features, 1, 1)[0] * token_blocks
        if blocks <= self.processors or block_tokens > FEW_TOKENS:  # one on each, and registers for large ones
            tiles = replace(tiles, blocks=1, stages=tiles.blocks * tiles.stages)
        fitted = self.shrunk(tiles, [weight_format])
        if not self.wgmma or blocks < least or not isinstance(fitted, WgmmaTiles) or not _has_gated(fitted):
            return None
        return fitted

    def _nearest_gated(self, tokens: int, out_features: int, cols: int) -> WgmmaTiles | None:
        """The tiles of the line with the epilogue that is nearest by shape, then by a number of tokens no smaller."""
        of_shape = [line for line in self.lines if line.is_for(out_features, cols)]
        lines = [line for line in of_shape if isinstance(line.tiles, WgmmaTiles) and _has_gated(line.tiles)]
        most = max((line.tokens for line in lines), default=0)
        fitting = [line for line in lines if line.tokens >= min(tokens, most)]
        best = min(fitting, key=lambda line: _rank(line, out_features, cols), default=None)
        return best.tiles if best is not None and isinstance(best.tiles, WgmmaTiles) else None

    def _nearest(self, tokens: int, out_features: int, cols: int, kinds: set[str]) -> Line | None:
        """The line of the nearest number of tokens that is no smaller, and the nearest shape."""
        lines = [line for line in self.lines if line.tiles.kind in kinds and line.is_for(out_features, cols)]
        counts = {line.tokens for line in lines}
        if not counts:
            return None
        at = min((count for count in counts if count >= tokens), default=max(counts))
        return min((line for line in lines if line.tokens == at), key=lambda line: _rank(line, out_features, cols))

    def _fitted(
        self, tiles: Tiles, line: Line, tokens: int, out_features: int, weight_format: FragmentFormat, cols: int,
        sum_bytes: int = 4,
    ) -> Tiling:  # fmt: skip
        """A line's tiling for another shape or format: as many blocks, if shared memory allows."""

        def blocks(of: Tiles, out: int, count: int) -> int:
            x, _, z = of.grid(out, 1, -(-count // of.tokens))
            return x * z

        tiles = self.shrunk(tiles, [weight_format])
        wanted = line.splits * blocks(line.tiles, line.out_features, line.tokens)
        splits = round(wanted / blocks(tiles, out_features, tokens))
        parts = tiles.parts if isinstance(tiles, MatvecTiles) else 1
        own = (line.tokens, line.out_features, line.cols) == (tokens, out_features, cols)
        if tokens >= _LONG_TOKENS and not own and isinstance(tiles, WgmmaTiles):
            chunks = weight_format.chunks(cols)
            splits = _splits_of_rounds(tiles, out_features, tokens, chunks, self.processors, sum_bytes)
        splits = max(1, min(splits, weight_format.chunks(cols) // (2 * parts), max(line.splits, 12)))
        return Tiling(tiles, splits)

    def staying(self, tiles: Tiles, tokens: int, cols: int, weight_format: FragmentFormat) -> Tiles:
        """The largest tiles by blocks that stay, in long steps; others as they are."""
        if tokens < _LONG_TOKENS or weight_format.chunks(cols) % 2 or not isinstance(tiles, WgmmaTiles):
            return tiles
        if (tiles.tokens, tiles.strips, tiles.groups, tiles.blocks, tiles.summed) != (MANY_TOKENS, 2, 2, 1, 1):
            return tiles
        fitted = self.shrunk(replace(tiles, stages=_STAYING_STAGES, step=1, stays=True), [weight_format])
        return fitted if isinstance(fitted, WgmmaTiles) and fitted.strips == tiles.strips else tiles

    def shrunk(self, tiles: Tiles, weight_formats: Sequence[FragmentFormat]) -> Tiles:
        """Fewer blocks per multiprocessor, then fewer stages, until their shared memory is there for all formats."""
        if isinstance(tiles, MatvecTiles):
            return tiles
        while (
            max(tiles.shared_bytes(weight_format) for weight_format in weight_formats) * tiles.blocks + 4096
            > self.shared_bytes
        ):
            if tiles.blocks > 1:
                tiles = replace(tiles, blocks=tiles.blocks - 1)
            elif tiles.stages > 3:
                tiles = replace(tiles, stages=tiles.stages - 1)
            elif isinstance(tiles, WgmmaTiles) and tiles.step > 1:
                tiles = replace(tiles, step=tiles.step // 2)
            else:
                return replace(tiles, strips=1)
        return tiles


def _is_of(tiles: Tiles, block_tokens: int) -> bool:
    """True if tiles may have so many tokens: of more than MANY_TOKENS, registers hold sums of one strip."""
    return block_tokens <= MANY_TOKENS or tiles.tokens > MANY_TOKENS


def _has_gated(tiles: WgmmaTiles) -> bool:
    """True if gate and up lie in a warpgroup; of more tokens than have room there, in a pair of them."""
    return tiles.strips == 2 if tiles.tokens <= MANY_TOKENS else (tiles.strips, tiles.groups) == (1, 2)


def _splits_of_rounds(
    tiles: WgmmaTiles, out_features: int, tokens: int, chunks: int, processors: int, sum_bytes: int
) -> int:
    """Splits of a long step by the rounds of blocks that run at once, and by what the splits' sums cost."""
    x, _, z = tiles.grid(out_features, 1, -(-tokens // tiles.tokens))
    area, at_once = tiles.tokens * out_features * z / (x * z), processors * tiles.blocks

    def cost(splits: int) -> float:
        rounds = -(-x * z * splits // at_once) / splits
        moved = 2 * splits * tokens * out_features * sum_bytes
        return rounds * chunks * area * _AREA_MS * tiles.blocks + moved / _SPLIT_BYTES_PER_MS

    return min(range(1, max(1, min(_MOST_LONG_SPLITS, chunks // _LEAST_CHUNKS)) + 1), key=cost)


def _warps_and_unroll(tokens: int) -> tuple[int, int]:
    """The mat-vec's warps of a multiprocessor that registers allow, and the chunks that each requests at once."""
    return 24 if tokens == 1 else 16, 2 if tokens <= 4 else 1


def _rank(line: Line, out_features: int, cols: int) -> tuple[float, int, bool]:
    """The least for the nearest shape, then the fewest tokens, then what was measured for this shape alone."""
    distance = abs(math.log(line.out_features / out_features)) + abs(math.log(line.cols / cols))
    return distance, line.tokens, not line.alone


def load_tuning(name: str, capability: tuple[int, int], processors: int, shared_bytes: int) -> DeviceTuning:
    """A device's tuning, by its driver's name of it: a table measured on this machine, the shipped one, or rules."""
    own, shipped, wgmma = _own_table(name), _shipped_table(name), capability == (9, 0)
    lines, expert_lines = own.lines or shipped.lines, own.expert_lines or shipped.expert_lines
    return DeviceTuning(wgmma, processors, shared_bytes, lines, expert_lines=expert_lines)


def own_table(name: str) -> Path:
    """The path of a table measured on this machine, under XDG_DATA_HOME or ~/.local/share."""
    return user_data() / "tuning" / f"{'-'.join(name.lower().split())}.json"


def write_table(path: Path, lines: Iterable[Line], expert_lines: Iterable[ExpertLine] = ()) -> None:
    """Write the best of these lines as a table, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [*(line.to_json() for line in best_lines(lines)), *(x.to_json() for x in best_expert_lines(expert_lines))]
    text = ",\n".join(map(json.dumps, rows))
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def _own_table(name: str) -> Table:
    """The table measured on this machine; a file that is not a table is passed over."""
    path = own_table(name)
    try:
        return Table.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Table()
    except (OSError, ValueError, TypeError, KeyError) as error:
        _LOG.warning("%s is not a tuning table (%s); the built-in table is used", path, error)
        return Table()


@cache
def _shipped_table(name: str) -> Table:
    file = next((table for word, table in _TABLES.items() if word in name.split()), None)
    if file is None:
        return Table()
    return Table.parse(resources.files("realizar.backends.cuda").joinpath("tables", file).read_text(encoding="utf-8"))


# A line counts for its own matrices and number of experts, and for steps with as many pairs or fewer, down to half. A
# grouped matmul's ring is made as deep as the weights' format allows. Both matmuls of a mixture share the places of a
# tile, so a table has a line for gate and up and one for down, of one number of places. Mat-vecs of pairs, for few
# tokens, have lines of the same kind.

_MARK = "experts"  # begins a line of a table

ExpertTiles: TypeAlias = AnyTiles | MatvecTiles
"""Of a grouped matmul, or of the mat-vec of pairs."""
_WITHOUT_RING: dict[str, type[DirectTiles | MatvecTiles]] = {"direct": DirectTiles, "matvec": MatvecTiles}


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture's matrices: `hidden` is of the stream, `width` between gate or up and down."""

    experts: int
    hidden: int
    width: int

    @staticmethod
    def of(experts: Experts) -> ExpertShape:
        return ExpertShape(experts.num_experts, experts.down.out_features, experts.down.in_features)

    @staticmethod
    def of_stack(experts: int, out_features: int, in_features: int, gated: bool) -> ExpertShape:
        """The shape of a mixture whose gate and up together, or whose down, has these features."""
        if gated:
            return ExpertShape(experts, in_features, out_features // 2)
        return ExpertShape(experts, out_features, in_features)


@dataclass(frozen=True, slots=True)
class ExpertLine:
    """A measured matmul over experts.

    Attributes:
        pairs: of a token and an expert, in the step. shape: of the mixture.
        gated: of gate and up with the activation, or else of down.
        tiles: how it ran. ms: how long, of one launch in a graph of many.
    """

    pairs: int
    shape: ExpertShape
    gated: bool
    tiles: ExpertTiles
    ms: float

    @property
    def work(self) -> str:
        part = "gate and up" if self.gated else "down"
        return f"{part} of {self.shape.experts} experts, {self.shape.hidden} x {self.shape.width}, {self.pairs} pairs"

    def to_json(self) -> list[Any]:
        """["experts", pairs, experts, hidden, width, 1 if gated else 0, kind, the tiles' numbers, ms].

        Rows that are laid in tiles first make the numbers longer by a 1.
        """
        names = [field.name for field in fields(self.tiles) if field.name not in ("kind", "laid")]
        numbers = [getattr(self.tiles, name) for name in names] + [1] * is_laid(self.tiles)
        return [_MARK, self.pairs, *astuple(self.shape), int(self.gated), self.tiles.kind, numbers, round(self.ms, 5)]

    @staticmethod
    def is_line(values: Sequence[Any]) -> bool:
        return values[0] == _MARK

    @staticmethod
    def from_json(values: Sequence[Any]) -> ExpertLine:
        _, pairs, experts, hidden, width, gated, kind, numbers, ms = values
        shape = ExpertShape(experts, hidden, width)
        made = _WITHOUT_RING.get(kind)
        if made is not None:
            return ExpertLine(pairs, shape, bool(gated), made(*numbers), ms)
        tokens, strips, groups, stages, blocks, *laid = numbers
        tiles = GroupedTiles(kind, tokens, strips, groups, stages, blocks, bool(laid))
        return ExpertLine(pairs, shape, bool(gated), tiles, ms)


def is_laid(tiles: ExpertTiles | None) -> bool:
    return isinstance(tiles, GroupedTiles) and tiles.laid


def best_expert_lines(lines: Iterable[ExpertLine]) -> list[ExpertLine]:
    """The cheapest pair of lines of each shape and number of pairs: gate and up, and down, of one number of places.

    Where one of the two is a direct kernel's, whose sums have an order of their own, the cheapest pair of the others
    comes after them.
    """
    groups: dict[tuple[ExpertShape, int], list[ExpertLine]] = {}
    for line in lines:
        groups.setdefault((line.shape, line.pairs), []).append(line)
    chosen: list[ExpertLine] = []
    for key in sorted(groups, key=lambda key: (astuple(key[0]), key[1])):
        best = _cheapest(groups[key])
        if any(isinstance(line.tiles, DirectTiles) for line in best):
            in_order = _cheapest(line for line in groups[key] if not isinstance(line.tiles, DirectTiles))
            best = [*best, *(line for line in in_order if line not in best)]
        chosen += best
    return chosen


def _cheapest(lines: Iterable[ExpertLine]) -> list[ExpertLine]:
    """Of lines of one shape and number of pairs: gate and up, and down, of one number of places; or none."""
    of_places: dict[int, dict[bool, ExpertLine]] = {}
    for line in lines:
        both = of_places.setdefault(line.tiles.tokens, {})
        if line.gated not in both or line.ms < both[line.gated].ms:
            both[line.gated] = line
    whole = [both for both in of_places.values() if len(both) == 2]
    best = min(whole, key=lambda both: both[True].ms + both[False].ms, default={})
    return [best[gated] for gated in (True, False) if gated in best]


def updated_expert_lines(old: Iterable[ExpertLine], new: Iterable[ExpertLine]) -> list[ExpertLine]:
    """A table in which new lines replace the old ones of the same mixtures and numbers of pairs."""
    best = best_expert_lines(new)
    keys = {(line.shape, line.pairs) for line in best}
    return best_expert_lines([*best, *(line for line in old if (line.shape, line.pairs) not in keys)])


def measured_places(lines: Iterable[ExpertLine], pairs: int, shape: ExpertShape) -> int | None:
    """Places of a tile for a step of so many pairs, from lines of one kind; None where nothing near was measured."""
    line = _nearest([line for line in lines if line.shape == shape], pairs)
    return None if line is None else line.tiles.tokens


def measured_tiles(
    lines: Iterable[ExpertLine], pairs: int, shape: ExpertShape, gated: bool, places: int
) -> ExpertTiles | None:
    """Tiles of a matmul with these places, from lines of one kind; None where nothing near was measured."""
    fitting = [line for line in lines if (line.shape, line.gated, line.tiles.tokens) == (shape, gated, places)]
    line = _nearest(fitting, pairs)
    return None if line is None else line.tiles


def _nearest(lines: Sequence[ExpertLine], pairs: int) -> ExpertLine | None:
    """The line of the smallest number of pairs that is no smaller, and at most twice as large; of several the first."""
    near = (line for line in lines if pairs <= line.pairs <= 2 * pairs)
    return min(near, key=lambda line: line.pairs, default=None)
