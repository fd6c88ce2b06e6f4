"""Replicas planned for machines that are made up, with a model that is real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realizar.backends import select
from realizar.backends.devices import ChosenDevice
from realizar.backends.machine import read_machine
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.planned_load import plan_within
from realizar.errors import CapacityError, InvalidRequestError
from realizar.replicas import planning
from realizar.replicas.link import visible_gpus
from realizar.replicas.places import Core
from realizar.replicas.planning import PlannedReplica, ReplicaQuestion, divide, plan_replicas
from tiny_model import write_tiny_model

GB = 10**9
CARD = {"name": "card", "fault": None, "bus_id": None, "free_bytes": 70 * GB}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


def machine(monkeypatch: pytest.MonkeyPatch, num_cores: int, free_bytes: int, quota: float | None = None) -> None:
    found = replace(read_machine(), available_bytes=free_bytes)
    monkeypatch.setattr(planning, "read_machine", lambda: found)
    monkeypatch.setattr(planning, "processor_quota", lambda: quota)
    monkeypatch.setattr(planning, "allowed_cpus", lambda: frozenset(range(num_cores)))
    monkeypatch.setattr(planning, "read_cores", lambda allowed: tuple(Core((cpu,)) for cpu in sorted(allowed)))


def on_cpu(tiny: Path, count: int, **fields: Any) -> tuple[PlannedReplica, ...]:
    return divide(ReplicaQuestion(str(tiny), EngineConfig(device="cpu", **fields), count))


def test_cores_and_memory_are_divided(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    machine(monkeypatch, 8, 4 * GB)
    asked: list[int] = []

    def noting(checkpoint: Checkpoint, config: EngineConfig, memory_bytes: int) -> Any:
        asked.append(memory_bytes)
        return plan_within(checkpoint, config, memory_bytes)

    monkeypatch.setattr(planning, "plan_within", noting)
    planned = on_cpu(tiny, 4)
    assert asked == [int(3.6 * GB) // 4] * 4
    assert [each.config.threads for each in planned] == [2] * 4
    assert [each.place.cpus for each in planned] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {each.config.device for each in planned} == {"cpu"}
    assert not any(each.fit_context for each in planned)
    kv_bytes = {each.config.kv_cache_bytes for each in planned}
    assert len(kv_bytes) == 1
    assert 0 < (kv_bytes.pop() or 0) < 0.9 * GB
    assert {each.memory_bytes for each in planned} == {int(3.6 * GB) // 4}
    assert all(0 < (each.needed_bytes or 0) <= each.memory_bytes for each in planned)
    assert on_cpu(tiny, 4)[1].label.startswith("2 cores on node 0 (CPUs 2-3), ")


def test_each_replica_has_a_drafter_of_its_own(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    machine(monkeypatch, 4, 4 * GB)
    fields: dict[str, Any] = {"context_length": 256, "kv_cache_bytes": 4 << 20}
    alone, drafted = on_cpu(tiny, 2, **fields), on_cpu(tiny, 2, **fields, drafter=str(tiny))
    assert {each.config.drafter for each in drafted} == {str(tiny)}
    for one, other in zip(alone, drafted, strict=True):
        assert (other.needed_bytes or 0) - (one.needed_bytes or 0) > tiny.stat().st_size / 2


def test_a_limit_of_processor_time_is_divided_and_configured_threads_stay(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    machine(monkeypatch, 16, 4 * GB, quota=6.0)
    assert [each.config.threads for each in on_cpu(tiny, 2)] == [3, 3]
    assert [each.config.threads for each in on_cpu(tiny, 8)] == [1] * 8
    assert [each.config.threads for each in on_cpu(tiny, 2, threads=5)] == [5, 5]


def test_replicas_that_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    machine(monkeypatch, 4, 2 * GB)
    assert len(on_cpu(tiny, 4, kv_cache_bytes=100_000_000)) == 4
    with pytest.raises(CapacityError, match=r"^with --replicas 4, the model does not fit into 450\.0 MB"):
        on_cpu(tiny, 4, kv_cache_bytes=400_000_000)


def test_each_replica_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    machine(monkeypatch, 8, 4 * GB)
    monkeypatch.setattr(planning, "choose_device", lambda wanted: ChosenDevice("cuda", 0, "card"))
    monkeypatch.setattr(planning, "gpu_facts", lambda: ([{"device": f"cuda:{at}", **CARD} for at in range(4)], None))
    planned = divide(ReplicaQuestion(str(tiny), EngineConfig(), 3))
    assert [each.place.devices for each in planned] == [("cuda:0",), ("cuda:1",), ("cuda:2",)]
    assert {(each.config.device, each.fit_context, each.place.cpus) for each in planned} == {("cuda", True, ())}
    assert planned[2].label == "cuda:2, 70.00 GB free"
    assert {each.config.host_sharers for each in planned} == {3}
    given = divide(ReplicaQuestion(str(tiny), EngineConfig(), 2, memory_bytes=20 * GB))
    assert [each.label for each in given] == ["cuda:0, 20.00 GB free", "cuda:1, 20.00 GB free"]
    with pytest.raises(CapacityError, match="--replicas 5 needs as many GPUs, and 4 can run a model here"):
        divide(ReplicaQuestion(str(tiny), EngineConfig(), 5))
    with pytest.raises(InvalidRequestError, match="each replica has its own"):
        divide(ReplicaQuestion(str(tiny), EngineConfig(device="cuda:1"), 2))


def test_each_replica_gets_a_group_of_gpus(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    machine(monkeypatch, 8, 4 * GB)
    monkeypatch.setattr(planning, "choose_device", lambda wanted: ChosenDevice("cuda", 0, "card"))
    cards = [{"device": f"cuda:{at}", **CARD, "free_bytes": (70 - at) * GB} for at in range(5)]
    monkeypatch.setattr(planning, "gpu_facts", lambda: (cards, None))
    config = EngineConfig(tensor_parallel=2)
    planned = divide(ReplicaQuestion(str(tiny), config, 2))
    assert [visible_gpus(each.place, None) for each in planned] == ["0,1", "2,3"]
    assert planned[1].label == "cuda:2 and cuda:3, 2 processes, 67.00 GB free on each GPU"
    assert {(each.config.device, each.config.tensor_parallel, each.config.host_sharers) for each in planned} == {
        ("cuda", 2, 2)
    }
    needed = "--replicas 3 with --tensor-parallel 2 needs 6 GPUs, those of each replica of one kind, and 5 can run"
    with pytest.raises(CapacityError, match=needed):
        divide(ReplicaQuestion(str(tiny), config, 3))
    cards[3]["name"] = "other"
    assert [each.place.devices for each in divide(ReplicaQuestion(str(tiny), config, 2))] == [
        ("cuda:0", "cuda:1"), ("cuda:2", "cuda:4")]  # fmt: skip


def test_processes_of_a_replica_share_its_threads_and_each_takes_memory(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    machine(monkeypatch, 4, 4 * GB)
    alone = on_cpu(tiny, 2, kv_cache_bytes=10**8)
    planned = on_cpu(tiny, 2, kv_cache_bytes=10**8, tensor_parallel=2)
    assert [(each.place.cpus, each.config.threads) for each in planned] == [((0, 1), 2), ((2, 3), 2)]
    assert (planned[0].needed_bytes or 0) > (alone[0].needed_bytes or 0) + 100_000_000, "of another process"
    assert planned[0].label.startswith("2 cores on node 0 (CPUs 0-1), 2 processes, ")
    with pytest.raises(
        InvalidRequestError, match="tensor_parallel 2 needs as many threads, and each of 4 replicas has 1; --threads"
    ):
        on_cpu(tiny, 4, tensor_parallel=2)


def test_memory_may_be_given(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    machine(monkeypatch, 4, 9 * GB)
    config = EngineConfig(device="cpu")
    planned = divide(ReplicaQuestion(str(tiny), config, 2, memory_bytes=3 * GB))
    assert [each.memory_bytes for each in planned] == [1.5 * GB] * 2


def test_a_model_that_no_gpu_runs_gets_cores(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """As one engine would, where the device is left open."""
    machine(monkeypatch, 4, 4 * GB)
    monkeypatch.setattr(planning, "choose_device", lambda wanted: ChosenDevice("cuda", 0, "card"))
    monkeypatch.setattr(select, "refusal", lambda spec, kind: "no GPU runs it" if kind == "cuda" else None)
    planned = divide(ReplicaQuestion(str(tiny), EngineConfig(), 2))
    assert [each.config.device for each in planned] == ["cpu"] * 2
    assert [each.place.cpus for each in planned] == [(0, 1), (2, 3)]


def test_another_process_plans_and_its_errors_come_back(tiny: Path) -> None:
    assert len(plan_replicas(str(tiny), EngineConfig(device="cpu"), 2)) == 2
    with pytest.raises(CapacityError, match="does not fit"):
        plan_replicas(str(tiny), EngineConfig(device="cpu", kv_cache_bytes=900 * 10**12), 2)
