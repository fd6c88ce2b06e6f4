"""Verdicts in the user's cache: a file for each card, driver and set of kernels."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from realizar.backends import cuda
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.verdict.judge import Verdict
from realizar.errors import HubError
from realizar.hub.folders import user_cache

_LOG = logging.getLogger(__name__)
_PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")
_DRIVER = Path("/proc/driver/nvidia/version")


def known_verdicts(device: DeviceProfile) -> dict[str, Verdict]:
    """Verdicts on a card, by the small model; none of a file that can't be read, or is not whole."""
    try:
        return msgspec.json.decode(_file(device).read_bytes(), type=dict[str, Verdict])
    except (OSError, HubError, ValueError, msgspec.DecodeError):
        return {}


def keep_verdicts(device: DeviceProfile, verdicts: Mapping[str, Verdict]) -> None:
    """Does nothing where there is no cache that can be written."""
    try:
        file = _file(device)
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_bytes(msgspec.json.encode(verdicts))
        written.replace(file)
    except (OSError, HubError) as error:
        _LOG.warning("verdicts on %s are not kept: %s", device.name, error)


def _file(device: DeviceProfile) -> Path:
    card = f"{device.name} {device.capability} {device.processors} {device.shared_bytes}"
    name = hashlib.sha256(f"{card}\n{_driver()}\n{_kernels()}".encode()).hexdigest()[:32]
    return user_cache() / "verdicts" / f"{name}.json"


@cache
def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""


@cache
def _kernels() -> str:
    """A hash of the GPU backend's sources, and the versions of what compiles them."""
    made = hashlib.sha256(" ".join(map(_version, _PACKAGES)).encode())
    for path in _sources():
        made.update(path.read_bytes())
    return made.hexdigest()


def _sources() -> list[Path]:
    return sorted(path for path in Path(cuda.__file__).parent.rglob("*") if path.suffix in (".py", ".cu", ".json"))


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
