"""The GPUs of this machine, and why one of them can't run a model here."""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from realizar.extras import how_to_install

_LEAST_CAPABILITY = (8, 0)  # Ampere: what the CUDA C++ kernels and bfloat16 in Triton's need


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that torch lists.

    Attributes:
        name: as the driver gives it. capability: (major, minor).
        fault: why no model can run on it; None where one can.
        bus_id: on the PCI bus, such as `0000:1b:00.0`; None where an older torch does not say.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    fault: str | None
    bus_id: str | None = None

    @property
    def label(self) -> str:
        return f"cuda:{self.index}, {self.name}"

    def facts(self) -> dict[str, Any]:
        """What reports say of it."""
        return {
            "device": f"cuda:{self.index}",
            "name": self.name,
            "compute_capability": "{}.{}".format(*self.capability),
            "memory_bytes": self.memory_bytes,
            "free_bytes": torch.cuda.mem_get_info(self.index)[0] if self.fault is None else None,
            "fault": self.fault,
            "bus_id": self.bus_id,
        }


def find_cards() -> tuple[list[Card], str | None]:
    """All GPUs by their number; and where there are none, torch's reason, if it gives one."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        return [], str(said[0].message).splitlines()[0] if said else None
    return [_card(index) for index in range(torch.cuda.device_count())], None


def _card(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    capability = found.major, found.minor
    fault = None
    if torch.version.hip is None:
        fault = _missing_library() or _missing_compiler()
        if capability < _LEAST_CAPABILITY:
            least, has = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
            fault = f"compute capability {least} is needed, and it has {has}"
    return Card(index, found.name, capability, found.total_memory, fault, _bus_id(found))


def _bus_id(found: Any) -> str | None:
    domain, bus, device = (getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    return None if domain is None or bus is None or device is None else f"{domain:04x}:{bus:02x}:{device:02x}.0"


@cache
def _missing_library() -> str | None:
    try:
        from cuda.bindings import driver as _driver  # noqa: F401
    except ImportError:
        return f"cuda-bindings is not installed: {how_to_install('cuda')}"
    from realizar.backends.cuda.native import nvrtc

    try:
        nvrtc.version()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC is not installed ({error}): {how_to_install('cuda')}"
    return None


def _missing_compiler() -> str | None:
    """A line about what Triton lacks to compile the launchers of its kernels, as it looks for it; or None."""
    named = os.environ.get("CC")
    if named is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler, and there is neither gcc nor clang: install gcc, or set CC"
    if named is not None and shutil.which(named) is None:
        return f"Triton needs a C compiler, and {named}, which CC names, is not there"
    scheme = sysconfig.get_default_scheme()
    header = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)) / "Python.h"
    if not header.exists():
        return f"Triton needs Python's headers, and {header} is not there: install python3-dev"
    return None
