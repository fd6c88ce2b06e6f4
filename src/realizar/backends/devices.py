"""Devices that a model may run on, and what the engine around a backend has to know of each kind. Standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from realizar.config import Device


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device that a model runs on.

    Attributes:
        name: as its driver gives it, empty for the CPU.
        capability: a GPU's compute capability, (major, minor); (0, 0) where there is none.
    """

    kind: Device = "cpu"
    index: int = 0
    name: str = ""
    capability: tuple[int, int] = (0, 0)

    @property
    def place(self) -> str:
        """`cpu`, or `cuda:0` and so on."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"

    @property
    def label(self) -> str:
        return f"{self.place}, {self.name}" if self.kind == "cuda" else "cpu"

    def of_rank(self, rank: int) -> ChosenDevice:
        """That of a rank, where this is the first one's: a GPU by its number, or the CPU for all."""
        return replace(self, index=self.index + rank) if self.kind == "cuda" else self


THE_CPU = ChosenDevice()


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Constants of one kind of device.

    Attributes:
        rows, step_tokens: of one step where the configuration has no `max_running` or `max_step_tokens`: a GPU needs
            more to be busy.
        steps_in_flight: steps that a backend is given before the first one's result is asked for.
        tile_tokens: tokens that a matmul takes at once: one more takes as long as filling a further tile.
        stretch: times as long as a step of decodes that one with prompts may take: gaps of a CPU's streams are felt.
        kv_dtype: element type of the KV cache that `auto` stands for, unless all matrices are float32.
    """

    rows: int
    step_tokens: int
    steps_in_flight: int
    tile_tokens: int
    stretch: float
    kv_dtype: str


TRAITS: Mapping[Device, DeviceTraits] = {
    "cpu": DeviceTraits(rows=64, step_tokens=512, steps_in_flight=1, tile_tokens=12, stretch=2.5, kv_dtype="f16"),
    "cuda": DeviceTraits(rows=256, step_tokens=4096, steps_in_flight=2, tile_tokens=64, stretch=3.25, kv_dtype="bf16"),
}
"""The traits of each kind of device."""
