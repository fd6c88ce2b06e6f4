"""Long steps in 8-bit floats (e4m3) on compute capability 9.0: from how many tokens on, in which tiles. Off by default.

Weights stay as they are packed: the kernel decodes 128 columns at a time to e4m3, times a power of two for each 64
output features. Activations have a scale for each token and 128 columns, so that the largest of them is 448; products
of 128 columns are added in the tensor cores, and their sums, scaled, in float32. The price is fidelity: 3 bits of
mantissa in both operands.
"""

from __future__ import annotations

from collections.abc import Sequence

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.matmul.inputs import InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.native.sources import FP8Tiles, GatedActivation
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.errors import InvalidRequestError

LEAST_TOKENS = 1024
"""Tokens of a step, padded, from which on matmuls are in 8-bit floats: with fewer, blocks of 256 are too few."""
FP8_INPUT = InputFormat("fp8", 256)
_CAPABILITY = (9, 0)
_MOST_STAGES = 6
_BARRIER_BYTES = 2048  # of shared memory beside the ring: barriers, and tops of the gated epilogue


def route_fp8(
    matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], activation: GatedActivation | None
) -> MatmulConfig:
    """A matmul in 8-bit floats for segments of one merged output, with the gated epilogue where they can have one."""
    epilogue = activation if matrices[0].interleaved and matmuls.has_epilogues else None
    stage = max(FP8Tiles(FP8_INPUT.block_tokens, 1).stage_bytes(matrix.format) for matrix in matrices)
    stages = min(_MOST_STAGES, (matmuls.tuning.shared_bytes - _BARRIER_BYTES) // stage)
    tiles = FP8Tiles(FP8_INPUT.block_tokens, stages, cluster=1 if epilogue is None else 2)
    return MatmulConfig(tiles, FP8_INPUT, 1, epilogue=epilogue)


def check_fp8(device: DeviceProfile) -> None:
    """Raise InvalidRequestError for a GPU that does not multiply in 8-bit floats here."""
    if not device.runs("matmuls") or not device.runs("wgmma") or device.capability != _CAPABILITY:
        major, minor = device.capability
        raise InvalidRequestError(
            f"prompt_dtype fp8 needs an NVIDIA GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]};"
            f" {device.name} has {major}.{minor}",
            "prompt_dtype",
        )
