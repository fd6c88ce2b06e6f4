"""The CPU in the place of a card, for what happens to weights on their way there. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads
from realizar.quantization.source import MatrixSource


class FakeCard(DeviceProfile):
    """The CPU in the place of a card whose matmuls are CUDA C++: matrices go the way of raw blocks."""

    @property
    def has_cuda_kernels(self) -> bool:
        return True


class FakePacker:
    """Packs where the real one does, on the host."""

    def __init__(self, device: torch.device, *, repacks: bool = True) -> None:
        self.device = device

    def pack(
        self,
        parts: Sequence[MatrixSource],
        into: PackedMatrix | torch.Tensor | None = None,
        **options: Any,
    ) -> PackedMatrix:
        return pack_by_threads(parts, self.device, into, **options)
