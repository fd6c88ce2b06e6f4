"""Temperature, truncations and draws of many rows at once, in float64. torch.

A row's candidates are weights over the vocabulary: exp of the scaled logit, 0 for an id that may not be chosen. Each
truncation sees what the one before left; among equals the lower id comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from realizar.backends.cuda.sampling.logprobs import largest_ordered
from realizar.sampling_params import SamplingParams

_NO_WEIGHT = -700.0  # scaled logits from here down have weight 0
_SMALLEST = math.exp(_NO_WEIGHT)
_NEVER = float("inf")
_MOST_CANDIDATES = 1024


def column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 1]."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def scale(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """float64 [rows, ids]: (logit - largest) / temperature, at least -700. `temperatures` is [rows, 1]."""
    values = logits.double()
    return ((values - values.max(dim=1, keepdim=True).values) / temperatures).clamp(min=_NO_WEIGHT)


def weigh(scaled: torch.Tensor) -> torch.Tensor:
    """exp(scaled), and 0 at -700, in the same shape."""
    return torch.where(scaled > _NO_WEIGHT, torch.exp(scaled) - _SMALLEST, 0.0)


def shortest_prefix(keys: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """bool [rows, ids]: the shortest prefix, by (key, id), whose weight reaches the row's target; at least one id."""
    order = torch.sort(torch.where(weights > 0.0, keys, _NEVER), dim=1, stable=True).indices
    ordered = weights.gather(1, order)
    before = ordered.cumsum(dim=1) - ordered
    kept = before < targets
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)


def candidates(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits that top-k can leave and their ids, ascending, int64 [rows, most]; all, and None, where that is many.

    Whatever else truncates sees the same, for ids beyond the k largest have no weight.
    """
    most = max((s.top_k for s in samplings), default=0)
    if most > min(_MOST_CANDIDATES, logits.shape[1] - 1) or any(s.top_k <= 0 or s.top_n_sigma > 0.0 for s in samplings):
        return logits, None
    ids = largest_ordered(logits, most).sort(dim=1).values
    return logits.gather(1, ids), ids


def draw_truncated(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], xtc: Sequence[bool], uniforms: torch.Tensor
) -> torch.Tensor:
    """int64 [rows]: `draw` of what `truncate` leaves."""
    part, ids = candidates(logits, samplings)
    found = draw(truncate(part, samplings, xtc), uniforms)
    return found if ids is None else ids.gather(1, found[:, None])[:, 0]


def truncate(logits: torch.Tensor, samplings: Sequence[SamplingParams], xtc: Sequence[bool]) -> torch.Tensor:
    """Weights float64 [rows, vocab] after temperature, top-n-sigma, top-k, typical, top-p, min-p and XTC where it acts.

    Args:
        logits: float32 [rows, vocab] without NaN or +inf, at least one finite; -inf forbids an id.
    """
    scaled = scale(logits, column([s.temperature for s in samplings], logits))
    weights = weigh(scaled)
    if any(s.top_n_sigma > 0.0 for s in samplings):
        weights = torch.where(_within_sigma(logits, samplings), weights, 0.0)
    if any(0 < s.top_k < logits.shape[1] for s in samplings):
        weights = torch.where(_largest(logits, samplings), weights, 0.0)
    if any(s.typical_p < 1.0 for s in samplings):
        weights = torch.where(_typical(scaled, weights, samplings), weights, 0.0)
    if any(s.top_p < 1.0 for s in samplings):
        mass = column([s.top_p if s.top_p < 1.0 else _NEVER for s in samplings], logits)
        targets = mass * weights.sum(dim=1, keepdim=True)
        weights = torch.where(shortest_prefix(-scaled, weights, targets), weights, 0.0)
    if any(s.min_p > 0.0 for s in samplings):
        least = column([s.min_p for s in samplings], logits) * weights.max(dim=1, keepdim=True).values
        weights = torch.where(weights >= least, weights, 0.0)
    if any(xtc):
        weights = _exclude_top_choices(scaled, weights, samplings, xtc)
    return weights


def _within_sigma(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """True for logits at most `top_n_sigma` standard deviations (over allowed ids) below the largest."""
    values = logits.double()
    allowed = torch.isfinite(values)
    count = allowed.sum(dim=1, keepdim=True)
    mean = torch.where(allowed, values, 0.0).sum(dim=1, keepdim=True) / count
    spread = torch.where(allowed, values - mean, 0.0)
    sigma = ((spread * spread).sum(dim=1, keepdim=True) / count).sqrt()
    sigmas = column([s.top_n_sigma if s.top_n_sigma > 0.0 else _NEVER for s in samplings], logits)
    limits = values.max(dim=1, keepdim=True).values - torch.where(torch.isinf(sigmas), _NEVER, sigmas * sigma)
    return values >= limits


def _largest(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """The k largest of each row."""
    order = torch.sort(-logits, dim=1, stable=True).indices
    counts = column([s.top_k if s.top_k > 0 else _NEVER for s in samplings], logits)
    kept = torch.arange(logits.shape[1], device=logits.device)[None, :] < counts
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _typical(scaled: torch.Tensor, weights: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """The ids whose surprise is nearest the entropy, until they hold the mass."""
    total = weights.sum(dim=1, keepdim=True)
    entropy = total.log() - (weights * scaled).sum(dim=1, keepdim=True) / total
    away = (total.log() - scaled - entropy).abs()
    mass = column([s.typical_p if s.typical_p < 1.0 else _NEVER for s in samplings], scaled)
    return shortest_prefix(away, weights, mass * total)


def _exclude_top_choices(
    scaled: torch.Tensor, weights: torch.Tensor, samplings: Sequence[SamplingParams], xtc: Sequence[bool]
) -> torch.Tensor:
    """Keep only the least probable of the ids with probability `threshold` or more, the last among equals."""
    thresholds = column([s.xtc_threshold for s in samplings], scaled)
    high = (weights > 0.0) & (weights >= thresholds * weights.sum(dim=1, keepdim=True))
    acts = torch.tensor(xtc, device=scaled.device)[:, None] & (high.sum(dim=1, keepdim=True) >= 2)
    least = torch.where(high, scaled, _NEVER).min(dim=1, keepdim=True).values
    places = torch.arange(scaled.shape[1], device=scaled.device)[None, :]
    last = torch.where(high & (scaled == least), places, -1).max(dim=1, keepdim=True).values
    return torch.where(acts & high & (places != last), 0.0, weights)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the first id whose cumulated share of the weight exceeds the row's number in [0, 1)."""
    cumulated = weights.cumsum(dim=1)
    targets = uniforms[:, None] * cumulated[:, -1:]
    found = torch.searchsorted(cumulated, targets, right=True)[:, 0]
    last = torch.where(weights > 0.0, torch.arange(weights.shape[1], device=weights.device), -1).max(dim=1).values
    return torch.minimum(found, last)


def draw_mirostat(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], mu: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mirostat 2: choices, [rows], among ids of a surprise of at most mu bits, or the likeliest; and mu after them."""
    scaled = scale(logits, column([s.temperature for s in samplings], logits))
    weights = weigh(scaled)
    floor = weights.sum(dim=1, keepdim=True).log() - mu[:, None] * math.log(2.0)
    kept = scaled >= floor
    best = torch.zeros_like(kept).scatter_(1, scaled.argmax(dim=1, keepdim=True), value=True)
    weights = torch.where(torch.where(kept.any(dim=1, keepdim=True), kept, best), weights, 0.0)
    choices = draw(weights, uniforms)
    chosen = weights.gather(1, choices[:, None])[:, 0]
    surprise = (weights.sum(dim=1) / chosen).log2()
    tau = column([s.mirostat_tau for s in samplings], logits)[:, 0]
    eta = column([s.mirostat_eta for s in samplings], logits)[:, 0]
    return choices, mu - eta * (surprise - tau)
