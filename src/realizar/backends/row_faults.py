"""Errors of a row that can't be opened, sampled or pooled, in the same words for every backend. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import SamplingParams


def check_logit_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError where `logit_bias` names an id beyond the vocabulary."""
    beyond = [token_id for token_id in sampling.logit_bias if not 0 <= token_id < vocab_size]
    if beyond:
        message = f"logit_bias names token id {beyond[0]}; the vocabulary has {vocab_size} ids"
        raise InvalidRequestError(message, "logit_bias")


def nothing_allowed(masked: bool) -> InvalidRequestError:
    """The error of a row whose own parameters, and a grammar's mask where `masked`, forbid every id."""
    if masked:
        return InvalidRequestError("no token can be sampled: the grammar and min_tokens allow none", "structured")
    return InvalidRequestError("no token can be sampled: every one ends the output, before min_tokens", "min_tokens")


def unusable_logit() -> RealizarError:
    return RealizarError("no token can be sampled: the model gave a logit that is not finite")


def unusable_logits() -> RealizarError:
    return RealizarError("the model's logits are not usable: their maximum is not finite")


def finite_vector(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """A pooled hidden state, float32 [hidden_size], as it is; RealizarError where a value is NaN or infinite."""
    if not np.isfinite(vector).all():
        raise RealizarError("the model gave a hidden state that is not finite")
    return vector
