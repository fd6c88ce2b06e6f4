"""Opening the device, and the properties of it that kernels are chosen by.

Kernels of CUDA C++ belong to families, each of which something slower can replace on a card that refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from realizar.errors import CapacityError
from realizar.sizes import format_bytes

Family: TypeAlias = Literal["epilogues", "wgmma", "mat-vec", "matmuls", "repack", "attention", "scans", "sampling"]

SLOWER: Mapping[Family, str] = {
    "epilogues": "activations and residual adds are kernels of their own",
    "wgmma": "mma.sync multiplies and attends",
    "mat-vec": "tensor cores multiply few tokens, too",
    "repack": "the host packs the weights",
    "attention": "Triton attends",
    "scans": "Triton runs delta nets",
    "sampling": "the host samples, and slowly",
    "matmuls": "Triton multiplies, and slowly",
}
"""What runs in the place of a family's kernels; the least loss comes first, and the matmuls, which are many, last."""

_EPILOGUE = re.compile(r"(matvec|wgmma)_.*_(residual|silu|gelu|gelu_tanh|clamped|relu_squared)_tokens\d+")
_NAMES: tuple[tuple[Family, re.Pattern[str]], ...] = (
    ("epilogues", _EPILOGUE),
    ("wgmma", re.compile(r"(grouped_)?wgmma_")),
    ("mat-vec", re.compile(r"matvec_")),
    ("repack", re.compile(r"repack_")),
    ("attention", re.compile(r"attend_")),
    ("scans", re.compile(r"scan_")),
    ("sampling", re.compile(r"sampling")),
)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Properties of a GPU that decide which kernels run.

    Attributes:
        torch_device: where tensors go; the CPU runs Triton's interpreter, for tests.
        name: as the driver gives it. capability: (major, minor).
        processors: streaming multiprocessors.
        shared_bytes: shared memory that one block may ask for.
        without: families of CUDA C++ kernels that this card refuses, or gets wrong.
    """

    torch_device: torch.device
    name: str
    capability: tuple[int, int]
    processors: int
    memory_bytes: int
    shared_bytes: int = 99 << 10
    without: frozenset[Family] = frozenset()

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def has_cuda_kernels(self) -> bool:
        """True if CUDA C++ runs here: an NVIDIA card from Ampere on, as one is that is planned for (`meta`)."""
        if self.torch_device.type == "meta":
            return True
        return self.is_gpu and torch.version.hip is None and self.capability >= (8, 0)

    def runs(self, family: Family) -> bool:
        return self.has_cuda_kernels and family not in self.without

    @property
    def has_wgmma(self) -> bool:
        return self.capability == (9, 0) and self.runs("wgmma")

    @property
    def has_dependent_launch(self) -> bool:
        """True if a kernel may start while the one before it ends: from Hopper on."""
        return self.has_cuda_kernels and self.capability >= (9, 0)


def open_device(index: int = 0) -> DeviceProfile:
    """Open the GPU of a number; CapacityError where there is none that torch can use, or its driver refuses it."""
    if not torch.cuda.is_available():
        raise CapacityError("no GPU can be used: torch finds none (`--device cpu` runs without one)")
    try:
        found = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes the context: other programs may hold the card for themselves
    except (RuntimeError, AssertionError) as error:
        raise CapacityError(f"GPU {index} can't be used: {str(error).splitlines()[0]}") from error
    return DeviceProfile(
        torch.device("cuda", index), found.name, (found.major, found.minor), found.multi_processor_count,
        found.total_memory, found.shared_memory_per_block_optin,
    )  # fmt: skip


def has_memory_of_host(index: int) -> bool:
    """True if the GPU computes in the host's memory, as those that are part of a processor."""
    if index >= torch.cuda.device_count():  # one to plan for, which is not here
        return False
    return bool(getattr(torch.cuda.get_device_properties(index), "is_integrated", False))


def interpreter_device() -> DeviceProfile:
    """The CPU in a GPU's place: kernels run under Triton's interpreter. For tests."""
    return DeviceProfile(torch.device("cpu"), "interpreter", (0, 0), 4, 1 << 30)


def describe_card(device: DeviceProfile, compute: str, kv_dtype: str) -> str:
    """A line about the GPU, the types of attention and cache, and early starts of kernels."""
    major, minor = device.capability
    return (
        f"{device.name}, compute capability {major}.{minor}, {device.processors} multiprocessors,"
        f" {format_bytes(device.memory_bytes)}; attention multiplies in {compute}, the KV cache holds {kv_dtype};"
        f" kernels may start early: {'yes' if device.has_dependent_launch else 'no'}"
    )


def describe_refused(device: DeviceProfile) -> Iterator[str]:
    if not device.runs("matmuls"):
        yield "no CUDA C++ matmuls on this device: Triton multiplies"
    for family in sorted(device.without):
        yield f"without the kernels of {family}: {SLOWER[family]}"


def stream_of(device: torch.device) -> int:
    """The handle of torch's current stream; 0 on one that is planned for (`meta`)."""
    return 0 if device.type == "meta" else int(torch.cuda.current_stream(device).cuda_stream)


def free_bytes(device: DeviceProfile) -> int:
    """Memory that can be allocated now, what torch holds and does not use included."""
    if not device.is_gpu:
        return device.memory_bytes
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device.torch_device)[0])


class WrongKernelsError(Exception):
    """A load has to begin again, without families of kernels that were found to be wrong meanwhile."""

    def __init__(self, families: frozenset[Family]) -> None:
        super().__init__(", ".join(sorted(families)))
        self.families = families


def check_compared(device: DeviceProfile, compared: Callable[[], DeviceProfile] | None) -> None:
    """Wait for what others find of a device, if they compare it; WrongKernelsError where it is to go without more."""
    if compared is not None and (wrong := compared().without - device.without):
        raise WrongKernelsError(wrong)


def refused_family(kernel: str, without: frozenset[Family]) -> Family | None:
    """The family to go on without, where the kernel of a source was refused; None where nothing is left to give up.

    What has no family of its own belongs to the matmuls, as the mat-vecs of experts do. What fails in spite of families
    that were given up before takes all matmuls with it.
    """
    family: Family = next((family for family, name in _NAMES if name.match(kernel)), "matmuls")
    if family not in without:
        return family
    return "matmuls" if "matmuls" not in without else None
