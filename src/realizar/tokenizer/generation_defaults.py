"""Default sampling of a model: the values that its files recommend, then the built-in values."""

from __future__ import annotations

from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, InvalidRequestError
from realizar.sampling_params import BUILT_IN_SAMPLING, SAMPLERS, SamplingParams

_GGUF_PREFIX = "general.sampling."
_KINDS = {each.name: each.kind for each in SAMPLERS}


def default_sampling(checkpoint: Checkpoint) -> SamplingParams:
    """Each value is from the model's files, or built in; raises as `generation_defaults` does."""
    defaults: dict[str, Any] = {**BUILT_IN_SAMPLING, **generation_defaults(checkpoint)}
    return SamplingParams(**defaults)


def generation_defaults(checkpoint: Checkpoint) -> dict[str, float | int]:
    """Fields of `SamplingParams` that a model recommends, from `general.sampling.*` or `generation_config.json`.

    `do_sample: false` becomes temperature 0. Raises CheckpointError, naming file and key, where a value is not a number
    or out of range.
    """
    if checkpoint.format == "gguf":
        path, values = checkpoint.path, checkpoint.metadata
        keys = {each.name: _GGUF_PREFIX + each.gguf for each in SAMPLERS if each.gguf}
    else:
        path, values = checkpoint.path / "generation_config.json", checkpoint.metadata.get("generation_config") or {}
        keys = {each.name: each.json for each in SAMPLERS if each.json}
        if values.get("do_sample") is False:
            values = {**values, keys["temperature"]: 0.0}
    defaults: dict[str, float | int] = {}
    for name, key in keys.items():
        value = values.get(key)
        if value is None:
            continue
        where = f"key '{key}'"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(path, where, f"is {value!r}, which is not a number")
        number = _checked(name, value)
        if number is None:
            raise CheckpointError(path, where, f"{value!r} is out of range")
        defaults[name] = number
    return defaults


def _checked(name: str, value: float) -> float | int | None:
    try:
        number = _KINDS[name](value)
        SamplingParams(**{name: number})  # type: ignore[arg-type]
    except (InvalidRequestError, ValueError, OverflowError):  # NaN and infinity are no whole numbers
        return None
    return number
