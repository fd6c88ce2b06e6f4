"""The profile of a step: names, calls, bytes counted by hand, sums, the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from random_models import Recipe, random_model
from realizar.backends.base import Capacity
from realizar.backends.cpu.inspection.backend import time_operations
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.inspection import ReadLimit
from realizar.backends.parts import PartTime, cached_tokens_read
from realizar.bench.profile import (
    StepProfile,
    StepWork,
    one_step,
    profile_step,
    profile_svg,
    profile_table,
    summarise,
)
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError
from realizar.sampling_params import SamplingParams
from resolving import resolved
from step_inputs import opened_row, rows_of

SVG = "{http://www.w3.org/2000/svg}"
RECIPE = Recipe(64, 4, 2, weights="Q4_0", windows=(None, 40), parts=("token_norm",))


def capacity(*num_blocks: int) -> Capacity:
    return Capacity(32, num_blocks, 0, 0, 0, "f16", 0.0)


def test_rows_of_a_step_lie_side_by_side() -> None:
    step = one_step(capacity(100, 5), StepWork(batch=2, tokens=40, context=50))
    assert [(row.num_tokens, row.num_computed_tokens) for row in rows_of(step)] == [(40, 50)] * 2
    assert step.columns.starts.tolist() == [0, 40, 80]
    assert step.columns.token_ids.tolist() == [token_id for row in rows_of(step) for token_id in row.token_ids]
    assert step.positions.tolist() == [*range(50, 90)] * 2
    assert step.slot_mapping[0].tolist() == [*range(50, 90), *range(3 * 32 + 50, 3 * 32 + 90)]
    assert step.block_tables[1].tolist() == [[0, 1, 2], [3, 4, 0]]
    assert int(step.slot_mapping[1].max()) < 5 * 32


def test_a_window_is_read_once_for_each_row() -> None:
    spec, _ = random_model(RECIPE)
    full, windowed = (layer.mixer for layer in spec.layers[:2])
    step = one_step(capacity(100, 100), StepWork(batch=2, tokens=3, context=50))
    assert cached_tokens_read(full, step) == 2 * 53
    assert cached_tokens_read(windowed, step) == 2 * 42
    short = one_step(capacity(100, 100), StepWork(batch=1, tokens=3, context=7))
    assert cached_tokens_read(windowed, short) == 10


def test_times_of_one_part_are_added() -> None:
    times = [
        PartTime("norm", 1e-3),
        PartTime("qkv", 2e-3, 4_000_000),
        PartTime("norm", 3e-3),
        PartTime("attention output", 0.0),
    ]
    profile = summarise("cpu", StepWork(2, 3, 4), times, 8e-3, ReadLimit(10.0, 4_000_000))
    assert [(part.part, part.calls) for part in profile.parts] == [("norm", 2), ("qkv", 1), ("attention output", 1)]
    norm, qkv, output = profile.parts
    assert (norm.ms, norm.share_of_step, norm.bytes_read) == (pytest.approx(4), pytest.approx(0.5), 0)
    assert (qkv.gb_per_s, qkv.share_of_limit) == (pytest.approx(2), pytest.approx(0.2))
    assert (output.ms, output.gb_per_s) == (0, 0)
    assert (profile.sum_ms, profile.wall_ms) == (pytest.approx(6), 8)
    lines = profile_table(profile)
    assert lines[2].split() == ["qkv", "1", "2.000", "25.0%", "4.00", "2.0", "20%"]
    assert lines[-4].split() == ["rest", "2.000", "25.0%"]
    assert lines[-3].split() == ["step", "8.000", "100.0%", "4.00", "0.5", "5%"]
    assert "6.000 ms of a step's 8.000 ms; the rest is" in lines[-2]
    assert lines[-1] == "limit: 4 MB, read over and over, come at 10.0 GB/s"


def test_what_is_read_faster_than_the_limit_is_in_a_cache() -> None:
    times = [PartTime("qkv", 1e-3, 10_400_000), PartTime("head", 1e-3, 33_000_000)]
    profile = summarise("cpu", StepWork(), times, 1.5e-3, ReadLimit(10.0, 43_400_000))
    assert profile.rest_ms == 0
    lines = profile_table(profile)
    assert lines[1].endswith("104%"), "as near as measurements are"
    assert lines[2].endswith("in cache")
    assert "a step's 1.500 ms: they overlap in it" in lines[-2]
    assert "100%; in cache" not in ET.tostring(drawn(profile), "unicode")
    assert "; in cache" in ET.tostring(drawn(profile), "unicode")


def test_every_operation_of_a_step_is_named_and_counted() -> None:
    """Two threads: bytes are those of the packed matrices and of the cache, 2 heads of 64 in float16."""
    spec, checkpoint = random_model(RECIPE)
    backend, work = CPUBackend(), StepWork(batch=2, tokens=1, context=60)
    config = EngineConfig(threads=2, context_length=64, max_running=2, max_step_tokens=32)
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
    for row in range(2):
        backend.open(opened_row(row, SamplingParams(temperature=0), [0] * 61))
    times = time_operations(backend, one_step(backend.capacity(), work), 2)
    layers = len(spec.layers)
    calls = Counter(each.part for each in times)
    per_layer = {"norm": 2, "qk norm": 2, "qkv": 3, "rope": 1, "attention": 1, "attention output": 1, "output": 1,
                 "gate and up": 2, "activation": 1, "down": 1}  # fmt: skip
    once = {"select": 1, "final norm": 1, "head": 1}
    assert calls == {part: count * layers for part, count in per_layer.items()} | once
    read: Counter[str] = Counter()
    for each in times:
        read[each.part] += each.bytes_read
        assert each.seconds >= 0
    token_bytes = 2 * 2 * 64 * 2
    seen = sum(2 * (61 if layer.mixer.window is None else 40) for layer in spec.layers)
    assert read["attention"] == seen * token_bytes
    assert sum(read.values()) - read["attention"] == backend.capacity().weight_bytes
    backend.shutdown()


def test_a_mixture_reads_the_experts_that_are_chosen() -> None:
    """One token reads what its capacity says; several read each expert once, however many of them chose it."""
    recipe = Recipe(experts=6, per_token=2, feed_forward_size=256, windows=(None,))
    spec, checkpoint = random_model(recipe)
    backend, config = CPUBackend(), EngineConfig(threads=2, context_length=64, max_running=16, max_step_tokens=32)
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
    for row in range(16):
        backend.open(opened_row(row, SamplingParams(temperature=0), [0] * 5))
    one = time_operations(backend, one_step(backend.capacity(), StepWork(1, 1, 4)), 1)
    weights = sum(each.bytes_read for each in one if each.part != "attention")
    assert weights == backend.capacity().weight_bytes_per_token < backend.capacity().weight_bytes
    names = ["norm", "router", *["choice of experts"] * 3, *["expert gate and up"] * 2, "expert activation"]
    parts = [each.part for each in one]
    first = parts.index("router") - 1
    assert parts[first : first + 10] == [*names, "expert down", "sum over experts"]
    many = time_operations(backend, one_step(backend.capacity(), StepWork(16, 1, 4)), 1)
    weights = sum(each.bytes_read for each in many if each.part != "attention")
    assert weights == backend.capacity().weight_bytes, "16 tokens choose each of six experts"
    backend.shutdown()


def test_more_rows_than_there_are_logits_for_are_refused() -> None:
    spec, checkpoint = random_model(RECIPE)
    backend = CPUBackend()
    config = EngineConfig(threads=1, context_length=32, max_running=65, max_step_tokens=65)
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
    with pytest.raises(InvalidRequestError, match="64 rows"):
        time_operations(backend, one_step(backend.capacity(), StepWork(65, 1, 0)), 1)
    backend.shutdown()


def drawn(profile: StepProfile) -> ET.Element:
    return ET.fromstring(profile_svg(profile, "a <b> & c"))


def test_the_picture_shows_what_the_limit_allows() -> None:
    times = [PartTime("norm", 1e-3), PartTime("qkv", 4e-3, 20_000_000)]
    bars = drawn(summarise("cpu", StepWork(), times, 8e-3, ReadLimit(10.0, 20_000_000))).findall(f"{SVG}rect")[3:]
    widths = [float(bar.get("width", "nan")) for bar in bars]
    assert len(widths) == 5
    assert widths[4] == pytest.approx(widths[2] * 3 / 4, abs=0.1), "the rest: 3 ms"
    assert widths[0] == pytest.approx(widths[2] / 4, abs=0.1)
    assert widths[1] == 0
    assert widths[3] == pytest.approx(widths[2] / 2, abs=0.1)


def test_a_real_model(smollm2_path: Path) -> None:
    work = StepWork(1, 4, 100, repeats=2)
    reported: list[str] = []
    profile = profile_step(open_checkpoint(smollm2_path), EngineConfig(threads=1, device="cpu"), work, reported.append)
    assert [part.part for part in profile.parts][:3] == ["norm", "qkv", "rope"]
    assert next(part.calls for part in profile.parts if part.part == "down") == 30
    assert profile.sum_ms == pytest.approx(sum(part.ms for part in profile.parts))
    assert np.isfinite([profile.wall_ms, profile.limit_gb_per_s]).all()
    assert min(profile.wall_ms, profile.limit_gb_per_s) > 0
    assert profile.sum_ms + profile.rest_ms >= profile.wall_ms * 0.999, "nothing of a step is left without a name"
    assert profile.limit_bytes == sum(part.bytes_read for part in profile.parts)
    assert len(reported) == 3
