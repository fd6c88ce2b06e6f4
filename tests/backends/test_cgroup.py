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


def test_groups_without_limits(tmp_path: Path) -> None:
    tree(tmp_path, {
        "proc/self/cgroup": "0::/user.slice",
        "sys/fs/cgroup/user.slice/memory.max": "max",
        "sys/fs/cgroup/user.slice/memory.current": "1000",
        "sys/fs/cgroup/user.slice/cpu.max": "max 100000",
    })  # fmt: skip
    assert memory_limit(tmp_path) is None
    assert processor_quota(tmp_path) is None
    tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert memory_limit(tmp_path) is None
    assert processor_quota(tmp_path) is None


def test_version_2_counts_pages_of_files_as_free(tmp_path: Path) -> None:
    tree(tmp_path, {
        "proc/self/cgroup": "0::/system.slice/realizar.service",
        "sys/fs/cgroup/system.slice/realizar.service/memory.max": str(100 * MIB),
        "sys/fs/cgroup/system.slice/realizar.service/memory.current": str(70 * MIB),
        "sys/fs/cgroup/system.slice/realizar.service/memory.stat":
            f"anon 5\ninactive_file {10 * MIB}\nactive_file {20 * MIB}",
        "sys/fs/cgroup/system.slice/realizar.service/cpu.max": "150000 100000",
    })  # fmt: skip
    assert memory_limit(tmp_path) == MemoryLimit(100 * MIB, 60 * MIB)
    assert processor_quota(tmp_path) == 1.5


def test_the_narrowest_of_all_groups_up_to_the_root_counts(tmp_path: Path) -> None:
    tree(tmp_path, {
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/memory.max": str(50 * MIB),
        "sys/fs/cgroup/outer/memory.current": str(45 * MIB),
        "sys/fs/cgroup/outer/inner/memory.max": str(40 * MIB),
        "sys/fs/cgroup/outer/inner/memory.current": str(1 * MIB),
        "sys/fs/cgroup/outer/cpu.max": "400000 100000",
        "sys/fs/cgroup/outer/inner/cpu.max": "800000 100000",
    })  # fmt: skip
    assert memory_limit(tmp_path) == MemoryLimit(40 * MIB, 5 * MIB), "others of the outer group use the most of it"
    assert processor_quota(tmp_path) == 4.0


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    """Version 1 gives the path of the machine outside, of which nothing is mounted."""
    tree(tmp_path, {
        "proc/self/cgroup": "9:name=systemd:/docker/1f\n4:memory:/docker/1f\n2:cpuacct,cpu:/docker/1f",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(64 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(80 * MIB),
        "sys/fs/cgroup/memory/memory.stat":
            f"inactive_file 1\ntotal_inactive_file {5 * MIB}\ntotal_active_file {15 * MIB}",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert memory_limit(tmp_path) == MemoryLimit(64 * MIB, 4 * MIB)
    assert processor_quota(tmp_path) == 2.0


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
