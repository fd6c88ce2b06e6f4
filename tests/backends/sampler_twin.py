"""A float64 twin of the sampler in plain loops, written from the definitions, and how well draws fit a distribution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from realizar.sampling_params import SamplingParams


class SamplerTwin:
    """Distribution over token ids, step by step.

    `doubtful` becomes true when a comparison was so close that another order of summation may decide it otherwise.
    """

    def __init__(self) -> None:
        self.doubtful = False

    def reaches(self, value: float, limit: float) -> bool:
        if abs(value - limit) <= 1e-9 * max(abs(value), abs(limit)):
            self.doubtful = True
        return value >= limit

    def bounded(self, value: float) -> float:
        largest = float(np.finfo(np.float32).max)
        return float(np.float32(min(max(value, -largest), largest)))

    def dry_matches(self, sampling: SamplingParams, history: Sequence[int]) -> dict[int, int]:
        """Token to the longest match that it would lengthen, by comparing backwards at every place."""
        window = list(history)
        if sampling.dry_penalty_last_n >= 0:
            window = window[len(window) - min(len(window), sampling.dry_penalty_last_n) :]
        matches: dict[int, int] = {}
        for place in range(len(window) - 1):
            following, length = window[place + 1], 0
            while length <= place and window[place - length] == window[len(window) - 1 - length]:
                if window[place - length] in sampling.dry_sequence_breakers:
                    break
                length += 1
            if following not in sampling.dry_sequence_breakers:
                matches[following] = max(matches.get(following, 0), length)
        return matches

    def adjust(
        self,
        sampling: SamplingParams,
        logits: Sequence[float],
        prompt: Sequence[int],
        output: Sequence[int],
        allowed: set[int] | None = None,
    ) -> list[float]:
        """Logits after mask, bias, penalties and DRY; every stage rounds to float32."""
        result = []
        matches = self.dry_matches(sampling, [*prompt, *output])
        for token_id, logit in enumerate(logits):
            value = float(logit)
            if value == -math.inf or (allowed is not None and token_id not in allowed):
                result.append(-math.inf)
                continue
            if token_id in sampling.logit_bias:
                value = self.bounded(value + sampling.logit_bias[token_id])
            if token_id in prompt or token_id in output:
                penalty = sampling.repetition_penalty
                value = value / penalty if value > 0 else value * penalty
                count = output.count(token_id)
                if count:
                    value -= sampling.frequency_penalty * count + sampling.presence_penalty
                value = self.bounded(value)
            excess = matches.get(token_id, 0) - sampling.dry_allowed_length
            if sampling.dry_multiplier > 0 and excess >= 0:
                value = self.bounded(value - sampling.dry_multiplier * sampling.dry_base**excess)
            result.append(value)
        return result

    def softmax(self, scaled: dict[int, float]) -> dict[int, float]:
        top = max(scaled.values())
        weights = {token_id: math.exp(value - top) for token_id, value in scaled.items()}
        total = math.fsum(weights.values())
        return {token_id: weight / total for token_id, weight in weights.items()}

    def prefix(self, order: list[int], probabilities: dict[int, float], mass: float) -> set[int]:
        reached = 0.0
        for count, token_id in enumerate(order, start=1):
            reached += probabilities[token_id]
            if self.reaches(reached, mass):
                return set(order[:count])
        return set(order)

    def distribution(self, sampling: SamplingParams, adjusted: Sequence[float], xtc_acts: bool) -> dict[int, float]:
        """Id to probability after temperature and truncations. Not for mirostat, nor for temperature 0."""
        scaled = {i: value for i, value in enumerate(adjusted) if value > -math.inf}

        def ranked() -> list[int]:
            return sorted(scaled, key=lambda i: (-scaled[i], i))

        def restrict(kept: set[int]) -> None:
            for token_id in set(scaled) - kept:
                del scaled[token_id]

        if sampling.top_n_sigma > 0:
            mean = math.fsum(scaled.values()) / len(scaled)
            sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in scaled.values()) / len(scaled))
            # compared as differences: shifting all logits must not make the comparison look close
            best = max(scaled.values())
            restrict({i for i in scaled if self.reaches(sampling.top_n_sigma * sigma, best - scaled[i])})
        if sampling.top_k > 0:
            restrict(set(ranked()[: sampling.top_k]))
        top = max(scaled.values())
        for token_id, value in scaled.items():
            scaled[token_id] = (value - top) / sampling.temperature
        if sampling.typical_p < 1:
            probabilities = {i: p for i, p in self.softmax(scaled).items() if p > 0}
            restrict(set(probabilities))
            entropy = -math.fsum(p * math.log(p) for p in probabilities.values())
            away = {i: abs(-math.log(p) - entropy) for i, p in probabilities.items()}
            order = sorted(scaled, key=lambda i: (away[i], i))
            for one, other in itertools.pairwise(order):
                if away[one] != away[other] or scaled[one] != scaled[other]:
                    self.reaches(away[other] + 1, away[one] + 1)
            restrict(self.prefix(order, probabilities, sampling.typical_p))
        if sampling.top_p < 1:
            restrict(self.prefix(ranked(), self.softmax(scaled), sampling.top_p))
        probabilities = self.softmax(scaled)
        if sampling.min_p > 0:
            most = max(probabilities.values())
            restrict({i for i, p in probabilities.items() if self.reaches(p, sampling.min_p * most)})
            probabilities = self.softmax(scaled)
        if xtc_acts:
            high = [i for i in ranked() if self.reaches(probabilities[i], sampling.xtc_threshold)]
            restrict(set(scaled) - set(high[:-1]))
        return self.softmax(scaled)

    def within_surprise(self, sampling: SamplingParams, adjusted: Sequence[float], limit: float) -> dict[int, float]:
        """Id to probability under mirostat: of ids whose surprise is at most `limit` bits, or of the likeliest."""
        scaled = {i: value / sampling.temperature for i, value in enumerate(adjusted) if value > -math.inf}
        probabilities = self.softmax(scaled)
        kept = {i for i, p in probabilities.items() if p > 0 and self.reaches(limit, -math.log2(p))}
        return self.softmax({i: scaled[i] for i in kept or {max(scaled, key=lambda i: (scaled[i], -i))}})

    def pick(self, distribution: dict[int, float], uniform: float) -> int:
        """The first id, in order of ids, at which the cumulated probability exceeds `uniform`."""
        below = 0.0
        for token_id in sorted(distribution):
            below += distribution[token_id]
            if abs(below - uniform) < 1e-12:
                self.doubtful = True
            if below > uniform:
                return token_id
        raise AssertionError("probabilities do not sum to 1")


def normal_deviate_of_chi_square(counts: Mapping[int, int], expected: Mapping[int, float]) -> float:
    """Pearson's statistic as a standard normal deviate (Wilson and Hilferty), rare ids pooled."""
    rare = {i for i, mean in expected.items() if mean < 8}
    cells = [(counts.get(i, 0), mean) for i, mean in expected.items() if i not in rare]
    if rare:
        cells.append((sum(counts.get(i, 0) for i in rare), sum(expected[i] for i in rare)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    if len(cells) == 1:
        return statistic
    scale = 2 / (9 * (len(cells) - 1))
    return ((statistic / (len(cells) - 1)) ** (1 / 3) - (1 - scale)) / math.sqrt(scale)
