"""Measured matmuls over experts: lines of a tuning table, and what a step takes from them. torch-free.

A line counts for its own matrices and number of experts, and for steps with as many pairs or fewer, down to half. A
grouped matmul's ring is made as deep as the weights' format allows. Both matmuls of a mixture share the places of a
tile, so a table has a line for gate and up and one for down, of one number of places. Mat-vecs of pairs, for few
tokens, have lines of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, TypeAlias

from realizar.backends.cuda.native.grouped.source import AnyTiles, DirectTiles, GroupedTiles
from realizar.backends.cuda.native.sources import MatvecTiles
from realizar.models.spec import Experts

_MARK = "experts"  # begins a line of a table

ExpertTiles: TypeAlias = AnyTiles | MatvecTiles
"""Of a grouped matmul, or of the mat-vec of pairs."""
_WITHOUT_RING: dict[str, type[DirectTiles | MatvecTiles]] = {"direct": DirectTiles, "matvec": MatvecTiles}


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture's matrices.

    Attributes:
        experts: of a layer. hidden, width: of the stream, and between gate or up and down.
    """

    experts: int
    hidden: int
    width: int

    @staticmethod
    def of(experts: Experts) -> ExpertShape:
        """The shape of a model's mixture."""
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
        gated: True of gate and up with the activation, False of down.
        tiles: how it ran. ms: how long, of one launch in a graph of many.
    """

    pairs: int
    shape: ExpertShape
    gated: bool
    tiles: ExpertTiles
    ms: float

    @property
    def work(self) -> str:
        """The matmul, in words."""
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
        """True if a line of a table is of this kind."""
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
    """True if rows are laid in tiles before the matmul."""
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
