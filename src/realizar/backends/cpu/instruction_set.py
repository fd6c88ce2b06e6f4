"""Instruction sets that the kernels are written for, chosen by what the processor reports."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from realizar.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One way to multiply bytes.

    Attributes:
        lanes: 32-bit lanes of a vector, which is also the rows of a weight tile.
        features: LLVM feature names that all must be reported.
        tile_tokens: tokens that share one pass over a weight tile, largest first.
        processor: LLVM's name of the simplest processor that has it, or with the features added has: everything else is
            compiled for that too.
    """

    name: str
    lanes: int
    features: tuple[str, ...]
    tile_tokens: tuple[int, ...]
    processor: str

    @property
    def target_features(self) -> str:
        """The features as LLVM is told them."""
        return ",".join(f"+{feature}" for feature in self.features)


# What x86-64's levels are in LLVM: https://gitlab.com/x86-psABIs/x86-64-ABI has the features of each.
_LEVEL_3, _LEVEL_4, _ARM = "x86-64-v3", "x86-64-v4", "generic"
_OF_LEVEL_3 = (
    *("cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"),
    *("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
)
_OF_LEVEL_4 = (*_OF_LEVEL_3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_LEVELS = {_LEVEL_3: _OF_LEVEL_3, _LEVEL_4: _OF_LEVEL_4, _ARM: ("neon", "dotprod")}

INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("avx512_vnni", 16, ("avx512vnni", "avx512bw", "avx512vl", "f16c", "fma"), (12, 4, 2, 1), _LEVEL_4),
    InstructionSet("avx_vnni", 8, ("avxvnni", "avx2", "f16c", "fma"), (8, 4, 2, 1), _LEVEL_3),
    InstructionSet("avx2", 8, ("avx2", "f16c", "fma"), (12, 6, 3, 1), _LEVEL_3),
    InstructionSet("neon_dot", 4, ("dotprod", "neon"), (8, 4, 1), _ARM),
    InstructionSet("portable", 8, (), (4, 1), "x86-64"),
)
_AT_HWCAP = 16
_ARM_BITS = {"neon": 1, "dotprod": 20}  # HWCAP_ASIMD and HWCAP_ASIMDDP of Linux's asm/hwcap.h


def index_of(name: str) -> int:
    """Index into INSTRUCTION_SETS, for use as a compile-time constant."""
    for index, candidate in enumerate(INSTRUCTION_SETS):
        if candidate.name == name:
            return index
    known = ", ".join(candidate.name for candidate in INSTRUCTION_SETS)
    raise UnsupportedModelError(f"unknown instruction set {name!r}; known: {known}")


def host_features() -> Mapping[str, bool]:
    """LLVM's view of this processor: feature name to presence; on 64-bit Arm Linux's too, which knows more."""
    from llvmlite import binding

    features: Mapping[str, bool] = binding.get_host_cpu_features()
    if platform.machine() != "aarch64":
        return features
    bits = _hardware_bits()
    return {**features, **{name: bool(bits >> bit & 1) for name, bit in _ARM_BITS.items()}}


def _hardware_bits() -> int:
    """What Linux says of the processor (AT_HWCAP); 0 where the C library has no auxiliary vector."""
    read = getattr(ctypes.CDLL(None), "getauxval", None)
    if read is None:
        return 0
    read.restype, read.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return int(read(_AT_HWCAP))


def supported(candidate: InstructionSet, features: Mapping[str, bool]) -> bool:
    return all(features.get(feature, False) for feature in candidate.features)


# Kinds of processors whose kernels are the same, bit for bit, on all of a kind.
KINDS = tuple(each for each in INSTRUCTION_SETS if each.processor in _LEVELS)


def known_kind(features: Mapping[str, bool]) -> InstructionSet | None:
    """The kind of a processor with these features; None if it is of none, as where a virtual machine hides some."""
    best = next(candidate for candidate in INSTRUCTION_SETS if supported(candidate, features))
    levels = _LEVELS.get(best.processor)
    return best if levels is not None and all(features.get(feature, False) for feature in levels) else None


def select(name: str | None = None) -> InstructionSet:
    """The named instruction set, or the best that this processor reports; UnsupportedModelError where it lacks that."""
    features = host_features()
    if name is None:
        return next(candidate for candidate in INSTRUCTION_SETS if supported(candidate, features))
    chosen = INSTRUCTION_SETS[index_of(name)]
    if not supported(chosen, features):
        raise UnsupportedModelError(f"this processor does not report what instruction set {name!r} needs")
    return chosen
