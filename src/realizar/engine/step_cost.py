"""`StepCost`: what a step takes on GPUs, reckoned from what it reads, multiplies and adds up; nothing is run.

The parts of a step follow each other here, each at a rate that was measured of it alone, so that matmuls of few rows
read their weights first and multiply then. What the host adds is left out. The figures of these rates, and how far off
they are, are in docs/log/ranks.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from realizar.backends.devices import ChosenDevice
from realizar.backends.memory_plan import MemoryPlan
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.shard import shard
from realizar.models.spec import ModelSpec

_HALVES_FROM = 257  # tokens of a step whose sums go to other GPUs as halves
_LEAST_PARAMETERS = 10**9
_FLOAT, _HALF = 4, 2  # bytes


@dataclass(frozen=True, slots=True)
class CardRates:
    """What a kind of GPU does in a second, and what a layer takes whatever its size.

    Attributes:
        name: a part of the one that its driver gives.
        read: bytes of weights, keys, values and states.
        matmuls, expert_matmuls, attention_matmuls: floating-point operations of matmuls of halves, of experts' and
            of attention to a prompt.
        layer_s, mixture_s, state_s: seconds of a layer's launches; what experts in it take beside, and a state.
        sum_s: seconds of a sum over ranks of one row. sent: bytes to other GPUs.
    """

    name: str
    read: float
    matmuls: float
    expert_matmuls: float
    attention_matmuls: float
    layer_s: float
    mixture_s: float
    state_s: float
    sum_s: float
    sent: float


H200 = CardRates("H200", 4.5e12, 613e12, 308e12, 480e12, 13e-6, 5e-6, 8e-6, 2.7e-6, 350e9)


def rates_of(device: ChosenDevice) -> CardRates | None:
    """Those of a card; of one that need not be there those of an H200, and None of cards that were not measured."""
    is_known = device.kind == "cuda" and (not device.name or H200.name in device.name)
    return H200 if is_known else None


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """What ranks have of each expert in a layer, as parts of it.

    Attributes:
        most: of the rank with most of it, for which the others wait.
        all: of all ranks together: more than one where some have copies.
    """

    most: float = 1.0
    all: float = 1.0


def expert_parts(spec: ModelSpec, checkpoint: Checkpoint, ranks: int) -> ExpertParts:
    """Those of so many ranks, of the first mixture; raises as `shard`."""
    if not spec.mixtures():
        return ExpertParts()
    parts = (shard(spec, rank, ranks, checkpoint) for rank in range(ranks))
    widths = [part.mixtures()[0][1].up.out_features for part in parts]
    whole = spec.mixtures()[0][1].up.out_features
    return ExpertParts(max(widths) / whole, sum(widths) / whole)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What steps of a model take on so many GPUs of one kind, in seconds.

    Args:
        plan: of one GPU or of all ranks.
    """

    spec: ModelSpec
    plan: MemoryPlan
    rates: CardRates
    ranks: int = 1
    experts: ExpertParts = ExpertParts()

    @property
    def is_reckoned(self) -> bool:
        """False where a token is multiplied with few numbers: such steps are bound by the host and by small tiles."""
        return sum(self._parameters()) >= _LEAST_PARAMETERS

    def decode_s(self, rows: int, context: int) -> float:
        """A step of one token for each row, after so many tokens of each."""
        states = 2 * rows * self.plan.state_bytes  # which are read and written
        seen = rows * self.plan.kv_bytes_per_token * self._share_seen(context) * context
        read_s = (states + seen) / self.rates.read / self.ranks
        return self._matmuls_s(rows, rows) + read_s + self._launches_s() + self._sums_s(rows, rows)

    def prompt_s(self, tokens: int) -> float:
        """One step of a prompt's tokens, the first of a text."""
        operations = 0.0
        for _, part in self.spec.all_attentions():
            seen = tokens if part.window is None else min(part.window, tokens)
            operations += 4 * part.num_heads * part.head_size * (tokens * seen - seen * seen / 2)
        attention_s = operations / self.rates.attention_matmuls / self.ranks
        return self._matmuls_s(tokens, 1) + attention_s + self._launches_s() + self._sums_s(tokens, 1)

    def _matmuls_s(self, tokens: int, selected: int) -> float:
        """Of so many tokens, of which some have logits: weights that are read, then products."""
        rates, (dense, experts) = self.rates, self._weight_bytes(tokens)
        multiplied, of_experts = self._parameters()
        head = math.prod(self.spec.tensors[self.spec.head.weight].shape)
        operations = 2 * (tokens * (multiplied - head) + selected * head)
        dense_s = dense / rates.read + operations / rates.matmuls
        experts_s = experts / rates.read + 2 * tokens * of_experts / rates.expert_matmuls
        return dense_s / self.ranks + experts_s * self.experts.most

    def _parameters(self) -> tuple[int, int]:
        """Numbers that a token is multiplied with: of dense matrices, and of the experts that it goes through."""
        spec = self.spec
        sizes = {name: math.prod(source.shape) for name, source in spec.tensors.items()}
        dense = sum(sizes.values()) - (0 if spec.tied else sizes[spec.embedding])
        experts = 0
        for _, part in spec.mixtures():
            for stack in part.expert_linears():
                dense -= sizes[stack.weight]
                experts += sizes[stack.weight] * part.experts_per_token // part.num_experts
        return dense, experts

    def _weight_bytes(self, tokens: int) -> tuple[float, float]:
        """What so many tokens read: all ranks' dense weights, and once the experts that they choose by chance."""
        plan, whole = self.plan, float(self.plan.weight_bytes)
        mixture = next((part for _, part in self.spec.mixtures()), None)
        if mixture is None or plan.token_weight_bytes is None:
            return whole, 0.0
        unread = 1 - mixture.experts_per_token / mixture.num_experts  # of the experts, by one token
        experts = (whole - plan.token_weight_bytes) / unread if unread else 0.0
        return whole - experts, experts / self.experts.all * (1 - unread**tokens)

    def _share_seen(self, context: int) -> float:
        """Of so many tokens' keys and values, what attention reads where some of it has windows."""
        layers = [part for _, part in self.spec.attentions()]
        widths = [(part.num_kv_heads * part.head_size, part.window) for part in layers]
        whole = sum(width for width, _ in widths) * context
        seen = sum(width * min(context, window or context) for width, window in widths)
        return seen / whole if whole else 1.0

    def _launches_s(self) -> float:
        spec, rates = self.spec, self.rates
        return (
            len(spec.layers) * rates.layer_s
            + len(spec.mixtures()) * rates.mixture_s
            + len(spec.state_layers()) * rates.state_s
        )

    def _sums_s(self, tokens: int, selected: int) -> float:
        """Of the embedding and both branches of each layer, and of the logits that each rank has the others get."""
        if self.ranks == 1:
            return 0.0
        others, spec = self.ranks - 1, self.spec
        number = _HALF if tokens >= _HALVES_FROM else _FLOAT
        way = min(others, 2 * others / self.ranks)  # all rows to all, or through a rank that adds up
        sums, rows = 2 * len(spec.layers) + 1, tokens * spec.hidden_size * number
        logits = selected * spec.vocab_size * _FLOAT * others / self.ranks
        return sums * (self.rates.sum_s + way * rows / self.rates.sent) + logits / self.rates.sent
