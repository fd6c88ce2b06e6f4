"""The machine divided between replicas, over made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.replicas.link import visible_gpus
from realizar.replicas.places import (
    Core,
    Gpu,
    Place,
    cpu_list,
    gpu_groups,
    gpu_node,
    parse_cpu_list,
    places_on_cores,
    places_on_gpus,
    read_cores,
)
from realizar.replicas.planning import usable_gpus


def _cores(*per_node: int) -> list[Core]:
    """Cores of two threads each; thread n + total is the second of core n."""
    total, first, cores = sum(per_node), 0, []
    for node, count in enumerate(per_node):
        cores += [Core((cpu, cpu + total), node, node) for cpu in range(first, first + count)]
        first += count
    return cores


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 20))
def test_cores_are_divided_evenly_and_shared_only_where_there_are_too_few(per_node: list[int], count: int) -> None:
    cores = _cores(*per_node)
    places = places_on_cores(cores, count)
    assert len(places) == count
    taken = [core for place in places for core in place.cores]
    assert set(taken) <= set(cores)
    assert {len(place.cores) for place in places} == {max(len(cores) // count, 1)}
    assert all(place.is_shared == (count > len(cores)) for place in places)
    if count <= len(cores):
        assert len(set(taken)) == len(taken)
    else:
        counts = [taken.count(core) for core in cores]
        assert max(counts) - min(counts) <= 1


def test_replicas_stay_on_their_side_of_the_machine() -> None:
    nodes = [[core.node for core in place.cores] for place in places_on_cores(_cores(8, 8), 4)]
    assert nodes == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    assert [place.cores[0].node for place in places_on_cores(_cores(8, 8), 2)] == [0, 1]
    spread = places_on_cores(_cores(9, 9, 9, 9), 5)  # 7 cores each: a side has room for one alone
    assert [len(place.cores) for place in spread] == [7] * 5


def test_hardware_threads_go_with_their_core() -> None:
    first, second = places_on_cores(_cores(4), 2)
    assert (first.cpus, second.cpus) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert first.label == "2 cores on node 0 (CPUs 0-1,4-5)"
    assert places_on_cores(_cores(1), 2)[1].label == "1 core on node 0 (CPUs 0-1), shared with other replicas"


def test_each_replica_gets_a_gpu_and_the_cores_at_its_side() -> None:
    gpus = [Gpu(0, 1), Gpu(2, 0), Gpu(3, 1), Gpu(5, None)]
    places = places_on_gpus(gpu_groups(gpus, 1, 4), _cores(4, 4))
    assert [place.gpus for place in places] == [(gpu,) for gpu in gpus]
    assert [[core.node for core in place.cores] for place in places] == [[1, 1], [0] * 4, [1, 1], []]
    assert not set(places[0].cores) & set(places[2].cores)
    assert places[0].label == "cuda:0, 2 cores on node 1 (CPUs 4-5,12-13)"
    assert places[3].label == "cuda:5"
    assert gpu_groups(gpus, 1, 2) == [(gpu,) for gpu in gpus[:2]]


def test_groups_are_of_one_kind_and_on_one_side_where_that_is_possible() -> None:
    near, far = [Gpu(0, 0), Gpu(1, 1), Gpu(2, 0)], [Gpu(3, 1), Gpu(4, 1)]
    assert gpu_groups([*near, *far], 2, 2) == [(near[0], near[2]), (near[1], far[0])]
    assert gpu_groups([Gpu(0, 0), Gpu(1, 0), Gpu(2, 0), Gpu(3, 1)], 2, 2) == [
        (Gpu(0, 0), Gpu(1, 0)), (Gpu(2, 0), Gpu(3, 1))]  # fmt: skip
    assert gpu_groups([Gpu(0, 0, "a"), Gpu(1, 0, "b"), Gpu(2, 0, "a"), Gpu(3, 0, "b"), Gpu(4, 0, "b")], 2, 3) == [
        (Gpu(0, 0, "a"), Gpu(2, 0, "a")), (Gpu(1, 0, "b"), Gpu(3, 0, "b"))]  # fmt: skip
    one_side, across = places_on_gpus([(near[0], near[2]), (near[1], Gpu(5, 0))], _cores(2, 2))
    assert one_side.label == "cuda:0 and cuda:2, 2 cores on node 0 (CPUs 0-1,4-5)"
    assert across.label == "cuda:1 and cuda:5", "it may run on all cores"


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("ab")), max_size=9), st.integers(1, 3), st.integers(1, 4))
def test_no_gpu_is_in_two_groups(found: list[tuple[int, str]], size: int, count: int) -> None:
    gpus = [Gpu(index, *each) for index, each in enumerate(found)]
    groups = gpu_groups(gpus, size, count)
    taken = [gpu for group in groups for gpu in group]
    assert len(set(taken)) == len(taken) == size * len(groups)
    assert all(len({gpu.kind for gpu in group}) == 1 for group in groups)
    possible = sum(sum(gpu.kind == kind for gpu in gpus) // size for kind in "ab")
    assert len(groups) == min(count, possible)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(None, "2"), ("", "2"), ("4,5,6,7", "6"), ("GPU-a, GPU-b, GPU-c", "GPU-c"), ("7", "2")]
)
def test_a_replica_sees_its_gpu_by_the_name_that_the_server_sees_it_by(ours: str | None, theirs: str) -> None:
    assert visible_gpus(Place((), gpus=(Gpu(2),)), ours) == theirs
    group = visible_gpus(Place((), gpus=(Gpu(2), Gpu(0))), ours)
    assert group == f"{theirs},{(ours or '0').split(',')[0]}"
    assert visible_gpus(Place(()), ours) is None


def test_gpus_with_a_fault_get_no_replica() -> None:
    facts = [
        {
            "device": "cuda:0",
            "fault": "compute capability 8.0 is needed, and it has 7.5",
            "bus_id": None,
            "name": "old",
        },
        {"device": "cuda:1", "fault": None, "bus_id": None, "name": "card"},
    ]
    assert usable_gpus(facts) == [Gpu(1, None, "card")]


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_are_read_as_they_are_written(cpus: set[int]) -> None:
    assert parse_cpu_list(cpu_list(sorted(cpus))) == tuple(sorted(cpus))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def test_the_sides_of_a_machine_are_read(tmp_path: Path) -> None:
    """Two sockets of two cores, of two threads each; this process may not run on CPUs 3 and 7."""
    for cpu in range(8):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        _write(topology / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
        _write(topology / "physical_package_id", f"{cpu % 4 // 2}")
    _write(tmp_path / "node" / "node0" / "cpulist", "0-1,4-5")
    _write(tmp_path / "node" / "node1" / "cpulist", "2-3,6-7")
    cores = read_cores({0, 1, 2, 4, 5, 6}, tmp_path)
    assert cores == (Core((0, 4), 0, 0), Core((1, 5), 0, 0), Core((2, 6), 1, 1))


def test_a_system_that_says_nothing_has_one_side_and_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert read_cores({1, 3}, tmp_path) == (Core((1,)), Core((3,)))
    assert gpu_node("0000:1B:00.0", tmp_path) is None
    _write(tmp_path / "0000:1b:00.0" / "numa_node", "-1")
    assert gpu_node("0000:1B:00.0", tmp_path) is None
    _write(tmp_path / "0000:1b:00.0" / "numa_node", "1")
    assert gpu_node("0000:1B:00.0", tmp_path) == 1
