"""Names of models, and of those in requests: the errors of a name that is not served, or not at present."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from realizar.errors import EngineUnavailableError, InvalidRequestError
from realizar.server.errors import ApiError, cleaned, later, refused


def default_name(model: str) -> str:
    """The API's name of a model: a hub name as it is, or the last part of a path, without this machine's folders.

    It raises InvalidRequestError if the path is not UTF-8 text, which names in JSON are.
    """
    path = Path(model)
    name = path.resolve().name.removesuffix(".gguf") if path.exists() else model
    if any("\ud800" <= character <= "\udfff" for character in model + name):
        raise InvalidRequestError(f"the model's path {model!a} is not UTF-8 text, and can't be served", "model")
    return name


def not_loaded(name: str, error: Exception, retry_after_s: float) -> ApiError:
    """Its message is without this machine's folders."""
    message = f"The model '{name}' could not be loaded: {cleaned(str(error))}"
    return later(503, message, "model_not_loaded", retry_after_s)


def not_named(names: Sequence[str]) -> ApiError:
    listed = ", ".join(f"'{each}'" for each in names)
    return refused(f"model is missing: this server has {listed}", "model", "missing_required_parameter")


def not_served(name: str, names: Sequence[str], shown: Sequence[str]) -> ApiError:
    """The 404 of a model that is not served. The message lists `shown` where none of `names` is near."""
    near = difflib.get_close_matches(name[:200], names, 1)
    listed = ", ".join(f"'{each}'" for each in shown)
    hint = f" (did you mean '{near[0]}'?)" if near else f" (this server has {listed})"
    return ApiError(404, f"The model {name[:200]!a} does not exist{hint}", param="model", code="model_not_found")


def shutting_down() -> EngineUnavailableError:
    return EngineUnavailableError("the server is shutting down", 5.0)
