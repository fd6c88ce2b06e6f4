"""Keyword arguments of `LLM` become an `EngineConfig`: they are its fields, or vLLM's names for some of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from realizar.config import EngineConfig

VLLM_NAMES: Mapping[str, str] = {
    "max_model_len": "context_length",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_step_tokens",
    "num_speculative_tokens": "speculative_tokens",
    "enable_prefix_caching": "prefix_cache",
}
"""vLLM's names of fields; `realizar serve` takes them as options too."""


def with_options(config: EngineConfig | None, options: Mapping[str, Any], others: tuple[str, ...]) -> EngineConfig:
    """Apply keyword arguments to a configuration.

    Args:
        config: None takes the default configuration.
        others: names of parameters that are not fields, for suggestions.

    Raises:
        TypeError: a name is unknown (the error names the nearest), or two names mean the same field.
        InvalidRequestError: a value is out of range.
    """
    known = [field.name for field in fields(EngineConfig)]
    changes: dict[str, Any] = {}
    for name, value in options.items():
        field = VLLM_NAMES.get(name, name)
        if field not in known:
            near = difflib.get_close_matches(name, [*known, *VLLM_NAMES, *others], 1)
            hint = f"; did you mean {near[0]}?" if near else f"; the options are {', '.join(known)}"
            raise TypeError(f"LLM has no option {name!r}{hint}")
        if field in changes:
            raise TypeError(f"LLM was given {field!r} twice, once as {name!r}")
        changes[field] = value
    return replace(config or EngineConfig(), **changes)
