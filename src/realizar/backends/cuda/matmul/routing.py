"""Scores of experts and their choice in one kernel: the router reads the residual stream itself.

One kernel is for few tokens and one, on devices with clusters of blocks, for up to MANY_TOKENS. With more the router is
a matmul, there of the stream by products of halves and elsewhere of the norm in floats, and
`kernels.experts.choose_experts` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from realizar.backends.cuda.kernels.experts import score_experts
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.native.compiler import Source
from realizar.backends.cuda.native.experts.source import (
    CHOICE_SIZES,
    CLUSTER_BLOCKS,
    MANY_SIZES,
    MANY_WARPS,
    MOST_CHOSEN,
    MOST_GROUPS,
    ChoiceShape,
    choice_source,
    many_choices_source,
)
from realizar.models.parts import Norm
from realizar.models.spec import Experts

ROUTED_TOKENS = 16  # at most, for each reads the whole router, from the second-level cache
MANY_TOKENS = 256  # at most, where tokens share what is read of it
_FEW_TOKENS = 8  # at most, of more than 64 experts: 16 take a third or a half longer than by that for many
_OF_CLUSTER = ((64, 8), (128, 16), (MANY_TOKENS, 24))  # tokens of a step, up to each, and then of a cluster
_SCORE_FACTOR = 64.0  # of the stream's halves, which then reach 4.2e6
_SCORE_TILES = (  # of steps with up to so many tokens
    (1024, {"TOKENS": 32, "EXPERTS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}),
    (2048, {"TOKENS": 64, "EXPERTS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}),
    (4096, {"TOKENS": 64, "EXPERTS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}),
    (1 << 30, {"TOKENS": 128, "EXPERTS": 128, "COLUMNS": 64, "num_warps": 8, "num_stages": 3}),
)
# Of so many experts at most, longer steps have the tiles of steps with so many tokens.
_FEW_EXPERTS, _FEW_EXPERT_TOKENS = 32, 2048
_LEAST_OF_CLUSTER = 16  # for which there must be room: with fewer, many tokens would have clusters for several rounds


@dataclass(frozen=True, slots=True)
class Router:
    """A router whose norm is an RMSNorm without bias.

    Attributes:
        weights: float32 [experts, width], times the norm's weight; with a gate of the shared expert one row more, the
            last. bias: float32, of the rows' scores, or None.
        selection: float32 [experts], added to ranks; None adds nothing. scales: float32 [experts], of weights, or None.
        columns: the experts' weights for many tokens: float32, in the order in which tensor cores take them; None where
            that kernel does not run.
        shared: whether the shared expert is chosen too, as in `ChoiceShape`.
        halves: `split_weights` of the experts' weights, for more tokens than `most_tokens`; None where those have a
            matmul of the norm.
    """

    weights: torch.Tensor
    bias: torch.Tensor | None
    experts: Experts
    eps: float
    selection: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    shared: int = 0
    halves: torch.Tensor | None = None

    @property
    def key(self) -> ChoiceShape:
        part = self.experts
        return ChoiceShape(
            int(self.weights.shape[1]), part.num_experts, part.experts_per_token, part.scoring == "sigmoid",
            self.selection is not None, part.num_groups, part.groups_per_token, self.shared,
        )  # fmt: skip

    @property
    def most_tokens(self) -> int:
        return ROUTED_TOKENS if self.columns is None else MANY_TOKENS


class RouterKernels:
    def __init__(self, matmuls: MatmulKernels) -> None:
        self._matmuls = matmuls
        self._arrivals = torch.zeros(ROUTED_TOKENS, dtype=torch.int32, device=matmuls.device)

    @property
    def _clusters(self) -> bool:
        return self._matmuls.capability >= (9, 0)

    def halves(self, experts: Experts, weights: torch.Tensor) -> torch.Tensor | None:
        return split_weights(weights[: experts.num_experts]) if self._clusters else None

    def score(self, router: Router, hidden: torch.Tensor, scores: torch.Tensor) -> None:
        """`start_scores` of a router that has halves."""
        assert router.halves is not None
        start_scores(hidden, router.halves, router.eps, scores)

    def runs(self, experts: Experts, norm: Norm | None) -> bool:
        """True if a mixture and the norm before it have these kernels; with `batch_invariant` none has."""
        plain = norm is not None and norm.kind == "rms" and norm.bias is None
        fits = (
            experts.experts_per_token + (experts.shared is not None) <= MOST_CHOSEN
            and experts.num_groups <= MOST_GROUPS
        )
        return plain and fits and experts.router.in_features % 4 == 0 and not self._matmuls.batch_invariant

    def columns(self, key: ChoiceShape, weights: torch.Tensor) -> torch.Tensor | None:
        if not (self._clusters and key.has_many(_LEAST_OF_CLUSTER)):
            return None
        rows, units = key.padded_experts, CLUSTER_BLOCKS * key.units
        padded = torch.zeros((rows, units * 16), device=weights.device)
        padded[: key.experts, : key.width] = weights[: key.experts]
        # Of a tile and a unit: halves of 8 experts, and of a lane's four columns two for each multiplication.
        fragments = padded.view(rows // 16, 2, 8, units, 4, 2, 2)
        return fragments.permute(3, 0, 5, 2, 4, 6, 1).contiguous()

    def _few_tokens(self, key: ChoiceShape) -> int:
        """The largest step that the kernel for few tokens chooses for, where there is one for many."""
        return _FEW_TOKENS if key.rows > CLUSTER_BLOCKS * 8 else ROUTED_TOKENS

    def prepare(self, routers: Iterable[Router]) -> None:
        """Compile and load kernels; KernelError: one does not compile or does not fit the device."""
        self._matmuls.kernels.prepare(source for router in routers for source in self._sources(router))

    def _sources(self, router: Router) -> list[Source]:
        many = set() if router.columns is None else {_of_cluster(router.key, most) for most, _ in _OF_CLUSTER}
        few = choice_source(router.key, self._clusters)
        return [few, *(many_choices_source(router.key, tokens) for tokens in sorted(many))]

    def launch(
        self, router: Router, hidden: torch.Tensor, header: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor,
        weights: torch.Tensor, tokens: int,
    ) -> None:  # fmt: skip
        """Start the choice for `tokens` tokens, at most the router's `most_tokens`.

        Args:
            hidden: the residual stream, float32 [>= tokens, width], contiguous.
            header: int32, whose place 1 has the tokens that are no padding; others choose -1.
            scores: float32 [tokens, experts], written and read, and with a gate room for [tokens] behind them.
            chosen: int32 [>= tokens * places]. weights: float32, of as many.
        """
        part, key, vectors = router.experts, router.key, (router.bias, router.selection, router.scales)
        addresses = [0 if each is None else each.data_ptr() for each in vectors]
        read, written = [hidden.data_ptr(), header.data_ptr(), scores.data_ptr()], [chosen, weights]
        numbers = [router.eps, int(part.normalized), float(part.scale)]
        if router.columns is not None and tokens > self._few_tokens(key):
            of_cluster = _of_cluster(key, tokens)
            arguments = [
                router.columns.data_ptr(), *addresses, *read, *(each.data_ptr() for each in written), *numbers, tokens,
                router.weights.data_ptr() + 4 * key.experts * key.width if key.shared == 2 else 0,
            ]  # fmt: skip
            source, sizes = many_choices_source(key, of_cluster), MANY_SIZES
            grid, warps = (CLUSTER_BLOCKS, -(-tokens // of_cluster), 1), MANY_WARPS
        else:
            source, sizes, warps = choice_source(key, self._clusters), CHOICE_SIZES, key.warps(self._clusters)
            arguments = [
                router.weights.data_ptr(), *addresses, *read, self._arrivals.data_ptr(),
                *(each.data_ptr() for each in written), *numbers,
            ]  # fmt: skip
            grid = -(-key.rows // warps), tokens, 1
        self._matmuls.start(source, grid, warps * 32, arguments, sizes, self._matmuls.is_dependent(tokens))


def split_weights(weights: torch.Tensor) -> torch.Tensor:
    """float32 of any shape, cut at 65504, as high + low / 2048 in float16: [2, *shape]."""
    weights = weights.clamp(-65504, 65504)
    high = weights.half()
    return torch.stack([high, ((weights - high.float()) * 2048).half()])


def score_tile(tokens: int) -> dict[str, int]:
    """Constants of `score_experts` in a step of so many tokens."""
    return next(tile for most, tile in _SCORE_TILES if tokens <= most)


def start_scores(hidden: torch.Tensor, halves: torch.Tensor, eps: float, scores: torch.Tensor) -> None:
    """Start scores = RMSNorm(hidden) @ weights.T, for more tokens than `MANY_TOKENS`.

    Args:
        hidden: float32 [>= tokens, width], contiguous, of up to 4.2e6.
        halves: `split_weights` of [experts, width], which the norm's weight has been multiplied into.
        scores: float32 [tokens, experts], contiguous.
    """
    (tokens, experts), (highs, lows) = scores.shape, halves
    tile = score_tile(tokens if experts > _FEW_EXPERTS else min(tokens, _FEW_EXPERT_TOKENS))
    grid = -(-experts // tile["EXPERTS"]), -(-tokens // tile["TOKENS"])
    width = int(hidden.shape[1])
    score_experts[grid](hidden, _SCORE_FACTOR, eps, highs, lows, scores, experts, width, tokens, **tile)


@cache
def _of_cluster(key: ChoiceShape, tokens: int) -> int:
    """Tokens of a cluster in a step of so many: as measured, or fewer where shared memory has no room for them.

    An H200 has 15 clusters at once, so that steps of over 240 tokens take a second round where 24 find no room.
    """
    wanted = next(each for most, each in _OF_CLUSTER if tokens <= most)
    return max(each for _, each in _OF_CLUSTER if each <= wanted and key.has_many(each))


class ExpertsRead:
    """Counts that kernels add to; nothing waits for them until they are asked for.

    Attributes:
        counts: int64 [2, 2], of mixtures without a shared expert among theirs, and of those with one: experts that they
            have read, each once in a step, and steps.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.counts = torch.zeros((2, 2), dtype=torch.int64, device=device)

    def address(self, shared: int) -> int:
        """Of the counts that a kernel adds to; `shared` as in `PackedExperts`."""
        return self.counts[shared].data_ptr()

    def forget(self) -> None:
        """Begin again, after the steps that are on their way."""
        self.counts.zero_()

    def average(self) -> float | None:
        """Chosen experts that a mixture read in a step; None if no kernel counted. Waits for the device."""
        (read, steps), (with_shared, shared_steps) = self.counts.tolist()
        chosen = read + with_shared - shared_steps  # each of those steps read the shared expert too
        return chosen / (steps + shared_steps) if steps + shared_steps else None
