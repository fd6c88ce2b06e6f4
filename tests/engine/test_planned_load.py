"""Loads that are planned within a share of memory: what the plan promises holds, and what can't fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from images.vision_models import write_vision_files
from realizar.backends.base import ModelSource
from realizar.backends.devices import ChosenDevice
from realizar.backends.select import plan_memory, resolve_model
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.disk_cache import HOST_BYTES
from realizar.engine.core.pictures import KEPT_BYTES
from realizar.engine.loading import load_core
from realizar.engine.planned_load import load_of, plan_encoder, plan_within
from realizar.engine.process.planning import plan_loads
from realizar.errors import CapacityError, CheckpointError
from tiny_model import write_tiny_model

MEMORY = 1 << 30
CPU = EngineConfig(device="cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return open_checkpoint(path)


def test_an_engine_takes_what_was_planned_for_it(checkpoint: Checkpoint) -> None:
    load, memory = plan_within(checkpoint, CPU, MEMORY)
    assert memory == MEMORY
    assert load.num_bytes <= MEMORY
    assert (load.device, load.context_length, load.max_open) == ("cpu", 2048, 64 + 4 * 64)
    assert load.config.context_length == 2048
    core = load_core(checkpoint, load.config)
    try:
        capacity = core.capacity
        assert capacity.kv_cache_bytes <= (load.config.kv_cache_bytes or 0)
        assert capacity.weight_bytes + capacity.kv_cache_bytes < load.num_bytes
    finally:
        core.close()


def test_snapshots_beside_the_cache_of_a_cpu_are_part_of_its_load(checkpoint: Checkpoint) -> None:
    spec, resolved = resolve_model(checkpoint, CPU)
    plan = plan_memory(spec, checkpoint, resolved, MEMORY)
    config = replace(CPU, kv_cache_bytes=plan.contexts[-1].request_bytes)
    beside = replace(plan, num_host_snapshots=1, host_snapshot_bytes=1000)
    without, with_one = (load_of(each, config, resolved, spec.vocab_size).num_bytes for each in (plan, beside))
    assert with_one == without + 1000
    on_gpu = replace(beside, device="cuda"), replace(plan, device="cuda")
    assert len({load_of(each, config, resolved, spec.vocab_size).num_bytes for each in on_gpu}) == 1


def test_an_encoder_of_images_is_part_of_a_load_on_a_cpu(tmp_path: Path) -> None:
    """As the engine's process has it; with `none` there is none."""
    checkpoint = open_checkpoint(write_vision_files(tmp_path))
    config = replace(CPU, kv_cache_bytes=1 << 20, context_length=64)
    encoder = plan_encoder(checkpoint, resolve_model(checkpoint, config)[1])
    assert encoder.workspace_bytes > encoder.weight_bytes > 0
    assert encoder.host_bytes == encoder.weight_bytes + encoder.workspace_bytes + KEPT_BYTES
    seeing, blind = (
        plan_within(checkpoint, replace(config, mmproj=mmproj), MEMORY)[0].num_bytes for mmproj in ("auto", "none")
    )
    assert seeing == blind + encoder.host_bytes


def test_files_of_the_cache_are_part_of_a_load_on_a_cpu(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = replace(CPU, kv_cache_bytes=1 << 20, context_length=64)
    plain, kept = (
        plan_within(checkpoint, each, MEMORY)[0].num_bytes
        for each in (config, replace(config, cache_dir=str(tmp_path)))
    )
    assert kept == plain + HOST_BYTES


def test_a_context_that_does_not_fit_is_halved_unless_it_is_configured(checkpoint: Checkpoint) -> None:
    whole, _ = plan_within(checkpoint, EngineConfig(device="cpu", context_length=2048, max_running=1), MEMORY)
    cache = whole.config.kv_cache_bytes or 0
    one = cache // 4  # room for one request of the whole context, of the four that the prefix cache has room for
    short = whole.num_bytes - cache + 2 * one  # of which two fifths are less than one
    halved, _ = plan_within(checkpoint, EngineConfig(device="cpu", max_running=1), short)
    assert halved.context_length in (1024, 512)
    assert halved.num_bytes <= short
    with pytest.raises(CapacityError, match=r"the KV cache of one request of 2048 tokens \S+ \wB, which gets"):
        plan_within(checkpoint, EngineConfig(device="cpu", context_length=2048, max_running=1), short)


def test_a_configured_cache_stays_and_may_be_too_much(checkpoint: Checkpoint) -> None:
    load, _ = plan_within(checkpoint, EngineConfig(device="cpu", kv_cache_bytes=9_000_000), MEMORY)
    assert load.config.kv_cache_bytes == 9_000_000
    with pytest.raises(CapacityError, match=r"the model does not fit into 1.*; it is to have 1\S* \wB in all"):
        plan_within(checkpoint, EngineConfig(device="cpu", kv_cache_bytes=MEMORY), MEMORY)


def test_without_a_bound_a_share_of_free_memory_is_planned_with(checkpoint: Checkpoint) -> None:
    load, memory = plan_within(checkpoint, CPU, None)
    assert load.num_bytes <= memory


def test_planning_in_another_process_is_the_same(path: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_text("no model")
    first, second = plan_loads([str(path), str(wrong)], CPU, MEMORY)
    assert first.checked() == plan_within(checkpoint, CPU, MEMORY)[0]
    assert first.memory_bytes == MEMORY
    with pytest.raises(Exception, match=r"wrong\.gguf: .*not a GGUF file") as caught:
        second.checked()
    assert not isinstance(caught.value, CheckpointError)  # over the pipe it is its base class, with the same text


def test_a_load_on_a_gpu_says_what_it_takes_asleep(checkpoint: Checkpoint) -> None:
    pytest.importorskip("torch", reason="the GPU's plan needs torch")
    pytest.importorskip("triton", reason="the GPU's plan needs triton")
    config = EngineConfig(device="cuda", context_length=512, kv_cache_bytes=1 << 26)
    spec, resolved = resolve_model(checkpoint, config, ChosenDevice("cuda", 1, "a card"))
    plan = plan_memory(spec, checkpoint, resolved, 8 << 30)
    load = load_of(plan, config, resolved, spec.vocab_size)
    assert load.device == "cuda:1"
    assert load.num_bytes == plan.needed_bytes + load.asleep_bytes + (1 << 26)
    assert plan.needed_bytes < load.host_bytes < plan.needed_bytes + load.asleep_bytes
    assert plan.reserved_bytes < load.asleep_bytes
    drafted, others = replace(resolved, speculative_tokens=3), {"drafter": ModelSource(spec, checkpoint)}
    both = plan_memory(spec, checkpoint, drafted, 8 << 30, others)
    assert load_of(both, config, drafted, spec.vocab_size).asleep_bytes >= (
        load.asleep_bytes + both.beside_reserved_bytes
    )
    assert 0 < both.beside_reserved_bytes < both.beside_bytes
    on_cpu, _ = plan_within(checkpoint, CPU, MEMORY)
    assert (on_cpu.host_bytes, on_cpu.asleep_bytes) == (0, 0)
