"""`Api` holds what handlers work with to use one model."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass

from realizar import __version__
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.errors import EngineUnavailableError
from realizar.server.metrics import Metrics
from realizar.server.served_model import ServedModel
from realizar.server.settings import ServerSettings
from realizar.server.token_names import TokenNames


@dataclass(frozen=True, slots=True)
class Api:
    """A model with its engine and its metrics, and the settings of the server.

    `fingerprint` is OpenAI's `system_fingerprint`: after it changes, the same seed may give another answer.
    `token_names` are names of tokens by their text, `token_id_names` by their ids.
    """

    engine: AsyncEngine
    model: ServedModel
    settings: ServerSettings
    metrics: Metrics
    fingerprint: str
    token_names: TokenNames
    token_id_names: TokenNames

    @property
    def max_tokens(self) -> int:
        """Of the longest request that can run, prompt and output; EngineUnavailableError or EngineDeadError without
        one.
        """
        return self.engine.info.max_request_tokens

    @property
    def max_model_len(self) -> int:
        """The same, or the model's context length while the model is being loaded."""
        try:
            return self.engine.info.max_request_tokens
        except EngineUnavailableError:
            return self.model.context_length

    def names(self, *, as_ids: bool | None) -> TokenNames:
        """Names of tokens; `as_ids` is the request's `return_tokens_as_token_ids`."""
        return self.token_id_names if as_ids else self.token_names


def make_api(engine: AsyncEngine, model: ServedModel, settings: ServerSettings, metrics: Metrics | None = None) -> Api:
    """Make the `Api` of one model; `metrics` are those of its earlier loads, where it was loaded before."""
    digest = hashlib.sha256(f"{__version__} {model.name}".encode()).hexdigest()
    return Api(
        engine,
        model,
        settings,
        metrics or Metrics(model.name),
        f"fp_{digest[:10]}",
        TokenNames(model.tokenizer),
        TokenNames(model.tokenizer, as_ids=True),
    )


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def now_s() -> int:
    return int(time.time())
