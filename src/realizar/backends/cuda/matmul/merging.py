"""Makes a program's `MergedLinear`s, each once, and decides which of them may have an epilogue."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.weights.load import Group, Weights
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.program import Program
from realizar.models.parts import Linear


class Merger:
    """Makes the merged matmuls of a program, each once; `batch_invariant` as in `MergedLinear`."""

    def __init__(
        self, program: Program, weights: Weights, device: DeviceProfile, matmuls: MatmulKernels | None,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self._weights, self._device, self._matmuls = weights, device, matmuls
        self._batch_invariant = batch_invariant
        adds_residual = (block.join for block in program.blocks)
        self._residual_adds: set[Group] = {
            (join.linear.weight,) for join in adds_residual if join.linear and join.adds_directly
        }
        self._made: dict[Group, MergedLinear] = {}

    def merge(self, linears: Sequence[Linear]) -> MergedLinear:
        """Matmuls that share an input."""
        key = tuple(linear.weight for linear in linears)
        if key not in self._made:
            bias, matrices = self._weights.bias(tuple(linears)), self._weights.groups[key]
            adds_residual = key in self._residual_adds
            self._made[key] = MergedLinear(
                matrices, bias, self._device, self._matmuls, self._activation(key), adds_residual, self._batch_invariant
            )
        return self._made[key]

    def _activation(self, key: Group) -> GatedActivation | None:
        """The activation of the feed-forward that begins with these matrices, if packed matrices consume its result.

        And if those read the same format, and that has a buffer of its own: activations of as many columns as the
        input have the input's.
        """
        feed_forward = self._weights.gated.get(key)
        if feed_forward is None or feed_forward.down.in_features == feed_forward.up.in_features:
            return None
        down = self._weights.groups[(feed_forward.down.weight,)]
        if not all(isinstance(matrix, PackedMatrix) for matrix in down):
            return None
        packed = (matrix for matrix in (*self._weights.groups[key], *down) if isinstance(matrix, PackedMatrix))
        return feed_forward.activation if len({matrix.format.is_float for matrix in packed}) <= 1 else None
