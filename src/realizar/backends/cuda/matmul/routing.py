"""Scores of experts and their choice in one kernel, for few tokens: the router reads the residual stream itself.

With more tokens the router is a matmul of floats, and `kernels.experts.choose_experts` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.native.compiler import compile_sources
from realizar.backends.cuda.native.experts.source import (
    CHOICE_SIZES,
    CHOICE_WARPS,
    MOST_CHOSEN,
    MOST_GROUPS,
    ChoiceShape,
    choice_source,
)
from realizar.backends.cuda.native.launcher import Kernel
from realizar.models.spec import Experts, Norm

ROUTED_TOKENS = 16  # at most: each reads the whole router, from the second-level cache


@dataclass(frozen=True, slots=True)
class Router:
    """A router whose norm is an RMSNorm without bias.

    Attributes:
        weights: float32 [experts, width], times the norm's weight. bias: float32 [experts] of scores, or None.
        experts: of the layer. eps: of the norm.
        selection: float32 [experts], added to ranks; None adds nothing. scales: float32 [experts], of weights, or None.
    """

    weights: torch.Tensor
    bias: torch.Tensor | None
    experts: Experts
    eps: float
    selection: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def key(self) -> ChoiceShape:
        """What the kernel depends on."""
        part = self.experts
        return ChoiceShape(
            int(self.weights.shape[1]), part.num_experts, part.experts_per_token, part.scoring == "sigmoid",
            self.selection is not None, part.num_groups, part.groups_per_token,
        )  # fmt: skip


class RouterKernels:
    """Compiles and starts the kernels of one device.

    Args:
        matmuls: of dense matrices, on the same device.
    """

    def __init__(self, matmuls: MatmulKernels) -> None:
        self._matmuls = matmuls
        self._kernels: dict[ChoiceShape, Kernel] = {}
        self._arrivals = torch.zeros(ROUTED_TOKENS, dtype=torch.int32, device=matmuls.device)

    def runs(self, experts: Experts, norm: Norm | None) -> bool:
        """True if a mixture and the norm before it have this kernel; with `batch_invariant` none has."""
        plain = norm is not None and norm.kind == "rms" and norm.bias is None
        fits = experts.experts_per_token <= MOST_CHOSEN and experts.num_groups <= MOST_GROUPS
        return plain and fits and experts.router.in_features % 4 == 0 and not self._matmuls.batch_invariant

    def prepare(self, keys: Iterable[ChoiceShape]) -> None:
        """Compile and load kernels.

        Raises:
            KernelError: one does not compile or does not fit the device.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._kernels]
        sources = [choice_source(key) for key in missing]
        for key, source, cubin in zip(missing, sources, compile_sources(sources, self._matmuls.arch), strict=True):
            self._kernels[key] = Kernel(cubin, source.name, 0)

    def launch(
        self, router: Router, hidden: torch.Tensor, header: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor,
        weights: torch.Tensor, tokens: int,
    ) -> None:  # fmt: skip
        """Start the choice for `tokens` tokens, at most ROUTED_TOKENS.

        Args:
            hidden: the residual stream, float32 [>= tokens, width], contiguous.
            header: int32, whose place 1 has the tokens that are no padding; others choose -1.
            scores: float32 [tokens, experts], written and read.
            chosen: int32 [>= tokens * per_token]. weights: float32, of as many.
        """
        part, vectors = router.experts, (router.bias, router.selection, router.scales)
        arguments = [
            router.weights.data_ptr(), *(0 if each is None else each.data_ptr() for each in vectors),
            *(each.data_ptr() for each in (hidden, header, scores, self._arrivals, chosen, weights)),
            router.eps, int(part.normalized), float(part.scale),
        ]  # fmt: skip
        grid, dependent = (-(-part.num_experts // CHOICE_WARPS), tokens, 1), self._matmuls.is_dependent(tokens)
        stream = self._matmuls.stream(None)
        self._kernels[router.key].launch(grid, CHOICE_WARPS * 32, arguments, CHOICE_SIZES, stream, dependent)
