"""`Grid` is what an encoder of images has on the device for all pictures of one size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.parts import places_between, windows_of
from realizar.models.parts import Rope
from realizar.models.tower import Tower


@dataclass(slots=True)
class Grid:
    """Pictures of so many rows and columns of patches.

    `angles`: cosines and sines of each rope, float32 [patches, half of its size]. `shares`: of the rows and the columns
    of the table of positions in those of the picture; None where it has the table's own. `order`: its patches, window
    by window, those of as many patches one after another, and `back`, where each is among them; None without windows.
    `windows`: how many of them have how many patches. `graphs`: of its parts, and the seconds of each, once it came
    again.
    """

    rows: int
    columns: int
    angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]]
    shares: tuple[torch.Tensor, torch.Tensor] | None
    order: torch.Tensor | None = None
    back: torch.Tensor | None = None
    windows: tuple[tuple[int, int], ...] = ()
    graphs: list[tuple[float, torch.cuda.CUDAGraph]] = field(default_factory=list)
    seen: bool = False

    @property
    def count(self) -> int:
        return self.rows * self.columns


def new_grid(tower: Tower, rows: int, columns: int, device: torch.device) -> Grid:
    """Of pictures of a tower, which has windows of one size at most."""

    def sent(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    places, side = np.indices((rows, columns), np.int32).reshape(2, -1), tower.side
    attentions = [attention for _, attention in tower.attentions()]
    window = next((each.window for each in attentions if each.window is not None), None)
    windows = sorted(windows_of(rows, columns, window), key=len)
    order, angles = np.concatenate(windows), {}
    for rope in {each.rope for each in attentions}:
        if rope is not None:
            turns = places[list(rope.axes)].T.astype(np.float32) * np.array(rope.inverse_frequencies, np.float32)
            turns = turns[order]
            angles[rope] = sent(np.cos(turns)), sent(np.sin(turns))
    grid = Grid(rows, columns, angles, None)
    if window is not None:
        grid.order, grid.back = sent(order), sent(np.argsort(order))
        grid.windows = tuple((number, length) for length, number in Counter(map(len, windows)).items())
    if tower.stretches is not None and (rows, columns) != (side, side):
        down, across = (sent(places_between(tower.stretches, count, side)) for count in (rows, columns))
        grid.shares = down, across
    return grid
