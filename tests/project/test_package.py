"""`import realizar` gives the public names, and loads none of the heavy modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

import realizar
from realizar.config import EngineConfig
from realizar.engine.async_llm import AsyncLLM
from realizar.engine.llm import LLM
from realizar.errors import RealizarError
from realizar.sampling_params import SamplingParams


def test_public_names() -> None:
    names = {"LLM", "AsyncLLM", "EngineConfig", "RealizarError", "SamplingParams", "__version__"}
    assert set(realizar.__all__) == names
    assert dir(realizar) == sorted(realizar.__all__)
    assert (realizar.LLM, realizar.EngineConfig) == (LLM, EngineConfig)
    assert realizar.AsyncLLM is AsyncLLM
    assert (realizar.RealizarError, realizar.SamplingParams) == (RealizarError, SamplingParams)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = realizar.nothing


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import realizar; realizar.SamplingParams, realizar.RealizarError", ("numpy", "numba", "torch", "tokenizers")),
        ("import realizar.scheduler.scheduler, realizar.backends.base", ("numba", "torch", "tokenizers")),
        ("import realizar.engine.llm", ("numba", "torch", "jinja2", "huggingface_hub")),
    ],
)
def test_imports_are_light(statement: str, absent: tuple[str, ...]) -> None:
    code = f"import sys; {statement}; print(sorted(set({absent!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
