"""`RowSampler`: sampling of one row's next token, with all state that lives from token to token. numpy only.

The reference of the CPU's sampling kernel and of the GPU's samplers, in float64. It applies `penalties.py` and `dry.py`
(changes of single logits), then `truncation.py` (temperature, top-k, top-p, min-p and others, with `select.py` for
selections without a sort), and draws. `logprobs.py` has log-probabilities. `logit_reader.py` reads with it the logits
that a row of a step wants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.reference_sampler import philox, truncation
from backends.reference_sampler.dry import Dry
from backends.reference_sampler.logprobs import token_logprobs
from backends.reference_sampler.penalties import LogitBias, Penalties
from realizar.backends.row_faults import nothing_allowed, unusable_logit
from realizar.batch import OpenedRow
from realizar.errors import RealizarError
from realizar.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, and its log-probabilities where `SamplingParams.logprobs` asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class RowSampler:
    """Sampler of one row.

    Order: the grammar's mask and forbidden end ids, logit bias, repetition, presence and frequency penalties, DRY; at
    temperature 0 the largest logit, lowest id first; else temperature, top-n-sigma, top-k, typical, top-p, min-p, XTC,
    or in place of these truncations mirostat 2. Adjusted logits are float32, as on any device.

    Everything but two numbers is derived from token ids and so is rebuilt exactly from `history`. Those two are `seed`,
    where the parameters name none, and `mirostat_mu` (bits, at first twice tau), which depends on logits that no longer
    exist. So a preempted row stays open, and keeps them.

    Args:
        opened: the row; `stop_token_ids` of its parameters may not be sampled before `min_tokens` tokens of output.
        vocab_size: logits per row.

    Raises:
        InvalidRequestError: `logit_bias` names an id beyond the vocabulary.
    """

    def __init__(self, opened: OpenedRow, vocab_size: int) -> None:
        sampling, history, num_prompt_tokens = opened.sampling, opened.history, opened.num_prompt_tokens
        self.sampling = sampling
        self.choice = opened.choice
        self.seed = sampling.seed or 0
        self.mirostat_mu = 2.0 * sampling.mirostat_tau
        self.num_output_tokens = len(history) - num_prompt_tokens
        self._end_ids = np.array([i for i in sampling.stop_token_ids if 0 <= i < vocab_size], np.intp)
        self._bias = LogitBias(sampling, vocab_size)
        self._penalties = Penalties(sampling, history, num_prompt_tokens, vocab_size)
        self._dry = Dry(sampling, history)
        self._observed: tuple[int, float] | None = None  # mirostat: the id last sampled, and its surprise in bits
        changes = self._bias.active or self._penalties.active or self._dry.active
        self._is_plain = sampling.greedy and sampling.logprobs is None and not changes

    def sample(
        self, logits: NDArray[np.float32], position: int, mask: NDArray[np.uint32] | None = None
    ) -> SampledToken:
        """Choose a token. State changes only in `accept`, so the same call gives the same token again.

        Args:
            logits: float32 [vocab], left as they are.
            position: index in the sequence of the token being sampled.
            mask: uint32 [ceil(vocab / 32)], bit i of word j allows id 32 j + i.

        Raises:
            InvalidRequestError: the request allows no id.
            RealizarError: a logit is NaN or +inf, or all are -inf.
        """
        adjusted = self.adjusted(logits, mask)
        best = int(adjusted.argmax())  # of NaNs the first
        largest = adjusted[best]
        if not np.isfinite(largest):
            raise self._unusable(logits, float(largest), mask is not None)
        token_id = best if self.sampling.greedy else self._draw(adjusted, position)
        top_n = self.sampling.logprobs
        return SampledToken(token_id, None if top_n is None else token_logprobs(logits, token_id, top_n))

    @property
    def takes_largest(self) -> bool:
        """True if the next token, without a mask, is the largest logit, and its log-probability is not wanted."""
        return self._is_plain and not self._forbids_end

    @property
    def _forbids_end(self) -> bool:
        return self._end_ids.size > 0 and self.num_output_tokens < self.sampling.min_tokens

    def accept(self, token_id: int) -> None:
        """Append a token to the row's output."""
        self.num_output_tokens += 1
        self._penalties.accept(token_id)
        self._dry.accept(token_id)
        if self._observed is not None and self._observed[0] == token_id:
            error = self._observed[1] - self.sampling.mirostat_tau
            self.mirostat_mu -= self.sampling.mirostat_eta * error
        self._observed = None

    def ends(self, token_id: int) -> bool:
        """True if the output ends with this token, the last one accepted.

        Before `min_tokens` a stop token is sampled only where a grammar leaves nothing else: it ends the output too.
        """
        late = self.num_output_tokens > self.sampling.min_tokens or self.sampling.structured is not None
        return late and token_id in self.sampling.stop_token_ids

    def adjusted(self, logits: NDArray[np.float32], mask: NDArray[np.uint32] | None) -> NDArray[np.float32]:
        """The logits after mask, bias, penalties and DRY; the given array itself if none of them is active."""
        forbids_end = self._forbids_end
        steps = [step for step in (self._bias, self._penalties, self._dry) if step.active]
        if mask is None and not forbids_end and not steps:
            return logits
        if mask is None:
            adjusted = logits.copy()
        else:
            bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), count=logits.size, bitorder="little")
            adjusted = np.where(bits.view(np.bool_), logits, np.float32(-np.inf))
        if forbids_end:
            allowed = adjusted[self._end_ids]
            adjusted[self._end_ids] = -np.inf
            if mask is not None and adjusted.max() == -np.inf:  # the grammar is complete: ending is all that is left
                adjusted[self._end_ids] = allowed
        for step in steps:
            step.apply(adjusted)
        return adjusted

    def _unusable(self, logits: NDArray[np.float32], largest: float, masked: bool) -> RealizarError:
        """The error of a row whose largest adjusted logit is not finite: the request's fault, or the model's."""
        if largest == -np.inf and np.isfinite(logits.max()):
            return nothing_allowed(masked)
        return unusable_logit()

    def _draw(self, logits: NDArray[np.float32], position: int) -> int:
        sampling = self.sampling
        if sampling.mirostat:
            return self._draw_mirostat(logits, position)
        uniform = self._uniform(position, philox.DRAW_TOKEN)
        xtc = sampling.xtc_probability > 0.0 and self._uniform(position, philox.DRAW_XTC) < sampling.xtc_probability
        if not xtc and not truncation.truncates(sampling):
            return truncation.draw_untruncated(logits, sampling.temperature, uniform)
        these = truncation.truncate(logits, sampling)
        if xtc:
            these = truncation.exclude_top_choices(these, sampling.xtc_threshold)
        return int(these.ids[truncation.draw(these, uniform)])

    def _draw_mirostat(self, logits: NDArray[np.float32], position: int) -> int:
        these = truncation.within_surprise(logits, self.sampling.temperature, self.mirostat_mu)
        index = truncation.draw(these, self._uniform(position, philox.DRAW_TOKEN))
        token_id = int(these.ids[index])
        self._observed = token_id, math.log2(float(these.weights.sum() / these.weights[index]))
        return token_id

    def _uniform(self, position: int, draw: int) -> float:
        return philox.uniform(self.seed, self.choice, position, draw)
