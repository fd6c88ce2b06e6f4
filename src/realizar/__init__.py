"""realizar runs GGUF and safetensors language models.

    from realizar import LLM, SamplingParams

    llm = LLM("smollm2:135m")
    answer = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(max_tokens=80))[0]
    print(answer.outputs[0].text)

Names are resolved on first use: importing the package imports neither numpy, numba nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realizar.config import EngineConfig
    from realizar.engine.async_llm import AsyncLLM
    from realizar.engine.llm import LLM
    from realizar.errors import RealizarError
    from realizar.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "RealizarError", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncLLM": "realizar.engine.async_llm",
    "EngineConfig": "realizar.config",
    "LLM": "realizar.engine.llm",
    "RealizarError": "realizar.errors",
    "SamplingParams": "realizar.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'realizar' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
