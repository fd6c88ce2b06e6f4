"""EngineConfig refuses what is out of range or of the wrong type, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError


@pytest.mark.parametrize("name", ["threads", "context_length", "max_running", "max_step_tokens", "kv_cache_bytes"])
@pytest.mark.parametrize("value", ["a", 2.0, True, 0, -1])
def test_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be") as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name


def test_integers_of_numpy_are_integers() -> None:
    assert EngineConfig(threads=np.int64(2)).threads == 2  # type: ignore[arg-type]


def test_unknown_cache_type_lists_the_known() -> None:
    with pytest.raises(InvalidRequestError, match="auto, f16, bf16, int8, fp8, not fp4"):
        EngineConfig(kv_cache_dtype="fp4")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("max_running", 65_537), ("speculative_tokens", 17), ("threads", 1025)])
def test_numbers_that_no_machine_could_serve(name: str, value: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be between [01] and {value - 1}, not {value}$"):
        EngineConfig(**{name: value})


def test_instruction_sets_are_those_of_the_cpu_backend() -> None:
    known = [each.name for each in INSTRUCTION_SETS]
    assert [EngineConfig(instruction_set=name).instruction_set for name in known] == known
    with pytest.raises(InvalidRequestError, match=f"instruction_set must be one of {', '.join(known)}, not mmx"):
        EngineConfig(instruction_set="mmx")
