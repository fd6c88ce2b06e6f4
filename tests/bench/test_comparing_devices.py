"""`doctor`'s comparison of a device with the CPU, with faults planted in what the device gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from realizar.backends.step_values import StageValues
from realizar.bench import step_values
from realizar.bench.step_values import DeviceFaultError, compare_with_cpu, trace_prompt
from realizar.cli.commands import doctor
from realizar.config import EngineConfig

STAGES = [
    StageValues(stage, 5.0, 4.0, 0, 0, (3.0, -4.0, 0.0)) for stage in ("layer 0 attention input", "last layer output")
]
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another size": ({"samples": (4.0, -5.0, 0.0)}, "cuda parts from the CPU by 28% in tiny-moe: last layer output"),
    "another place": ({"samples": (-4.0, 0.0, 3.0)}, "cuda parts from the CPU by 172% in tiny-moe: last layer output"),
    "nothing": ({"samples": (0.0, 0.0, 0.0)}, "cuda parts from the CPU by 100% in tiny-moe: last layer output"),
    "NaN": ({"num_nan": 1}, "cuda gives values that are not finite in tiny-moe: last layer output"),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Have a device `cuda` that rounds a little, and is at fault in mixtures; give what is run."""
    runs: list[tuple[str, int | None]] = []

    def trace(checkpoint: Any, config: EngineConfig, token_ids: Sequence[int]) -> list[StageValues]:
        runs.append((config.device, config.expert_used_count))
        if config.device == "cpu":
            return STAGES
        first, last = (replace(each, samples=(3.05, -4.05, 0.05)) for each in STAGES)
        return [first, replace(last, **fault)] if config.expert_used_count else [first, last]

    monkeypatch.setattr(step_values, "trace_prompt", trace)
    return runs


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_its_place(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, message = FAULTS[name]
    plant(monkeypatch, fault)
    with pytest.raises(DeviceFaultError) as refused:
        compare_with_cpu("cuda")
    assert str(refused.value) == message


def test_roundings_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = plant(monkeypatch, {})
    compare_with_cpu("cuda")
    assert runs == [(device, experts) for experts in (None, 8, None, None) for device in ("cuda", "cpu")]


@pytest.mark.full
def test_the_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each kind of layer, on the CPU alone: it agrees with itself."""
    seen: list[int] = []

    def trace(*given: Any) -> list[StageValues]:
        found = trace_prompt(*given)
        seen.append(len(found))
        return found

    monkeypatch.setattr(step_values, "trace_prompt", trace)
    compare_with_cpu("cpu")
    assert seen == [6, 6, 6, 6, 10, 10, 8, 8]


def test_doctor_fails_where_a_gpu_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, FAULTS["NaN"][0])
    facts = doctor._facts(None)
    gpu = {"device": "cuda", "name": "a card", "compute_capability": "9.0", "free_bytes": 1, "memory_bytes": 1}
    monkeypatch.setattr(doctor, "_facts", lambda _replicas: {**facts, "gpus": [{**gpu, "fault": None}]})
    monkeypatch.setattr(doctor, "_run_random_model", lambda _device: None)
    with pytest.raises(doctor.DoctorError, match="cuda computes what the CPU does"):
        doctor.doctor_command()
    assert FAULTS["NaN"][1] in capsys.readouterr().out
