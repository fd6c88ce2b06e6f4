"""Limits of control groups, read from trees of files as Linux has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from realizar.backends.cgroup import MemoryLimit, memory_limit, processor_quota

MIB = 1 << 20
NO_LIMIT = str((1 << 63) - 4096)  # as version 1 writes it


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert processor_quota(tmp_path) is None


_UNLIMITED = {
    "version 2": {
        "proc/self/cgroup": "0::/user.slice",
        "sys/fs/cgroup/user.slice/memory.max": "max",
        "sys/fs/cgroup/user.slice/memory.current": "1000",
        "sys/fs/cgroup/user.slice/cpu.max": "max 100000",
    },
    "version 1": {
        "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    },
}


@pytest.mark.parametrize("version", _UNLIMITED)
def test_groups_without_limits(tmp_path: Path, version: str) -> None:
    tree(tmp_path, _UNLIMITED[version])
    assert memory_limit(tmp_path) is None
    assert processor_quota(tmp_path) is None


_SERVICE = "sys/fs/cgroup/system.slice/realizar.service"
_PAGES_OF_FILES_ARE_FREE = {
    "proc/self/cgroup": "0::/system.slice/realizar.service",
    f"{_SERVICE}/memory.max": str(100 * MIB),
    f"{_SERVICE}/memory.current": str(70 * MIB),
    f"{_SERVICE}/memory.stat": f"anon 5\ninactive_file {10 * MIB}\nactive_file {20 * MIB}",
    f"{_SERVICE}/cpu.max": "150000 100000",
}
# Others of the outer group use the most of it, so that less is left than the inner one may take.
_THE_NARROWEST_UP_TO_THE_ROOT_COUNTS = {
    "proc/self/cgroup": "0::/outer/inner",
    "sys/fs/cgroup/outer/memory.max": str(50 * MIB),
    "sys/fs/cgroup/outer/memory.current": str(45 * MIB),
    "sys/fs/cgroup/outer/inner/memory.max": str(40 * MIB),
    "sys/fs/cgroup/outer/inner/memory.current": str(1 * MIB),
    "sys/fs/cgroup/outer/cpu.max": "400000 100000",
    "sys/fs/cgroup/outer/inner/cpu.max": "800000 100000",
}
# Version 1 gives the path of the machine outside, of which nothing is mounted.
_A_CONTAINER_SEES_ITS_OWN_GROUP_AT_THE_ROOT = {
    "proc/self/cgroup": "9:name=systemd:/docker/1f\n4:memory:/docker/1f\n2:cpuacct,cpu:/docker/1f",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(64 * MIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(80 * MIB),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * MIB}\ntotal_active_file {15 * MIB}",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
}


@pytest.mark.parametrize(
    ("files", "memory", "quota"),
    [
        pytest.param(_PAGES_OF_FILES_ARE_FREE, MemoryLimit(100 * MIB, 60 * MIB), 1.5, id="pages of files are free"),
        pytest.param(_THE_NARROWEST_UP_TO_THE_ROOT_COUNTS, MemoryLimit(40 * MIB, 5 * MIB), 4.0, id="nested groups"),
        pytest.param(_A_CONTAINER_SEES_ITS_OWN_GROUP_AT_THE_ROOT, MemoryLimit(64 * MIB, 4 * MIB), 2.0, id="container"),
    ],
)
def test_limits(tmp_path: Path, files: Mapping[str, str], memory: MemoryLimit, quota: float) -> None:
    tree(tmp_path, files)
    assert memory_limit(tmp_path) == memory
    assert processor_quota(tmp_path) == quota


def test_controllers_of_version_1_that_are_mounted_together(tmp_path: Path) -> None:
    tree(tmp_path, {
        "proc/self/cgroup": "2:cpu,cpuacct:/",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert processor_quota(tmp_path) == 3.0


@pytest.mark.parametrize("text", ["", "nonsense", "0::relative", "0::/../../etc", "4:memory"])
def test_what_is_not_understood_is_no_limit(tmp_path: Path, text: str) -> None:
    tree(tmp_path, {"proc/self/cgroup": text, "sys/fs/cgroup/memory.max": "lots", "sys/fs/cgroup/cpu.max": "1 0"})
    assert memory_limit(tmp_path) is None
    assert processor_quota(tmp_path) is None
