"""Packed experts on the CPU: twins in numpy of the kernels of mixtures, beside those of `packed_matmuls`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from backends.cuda.matmul.fp8_cases import FP8Values
from backends.cuda.matmul.packed_matmuls import _activated, _array, _floats, _join, _write_int8, decoded
from realizar.backends.cuda import load
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.cuda.matmul import grouped as grouped_matmuls
from realizar.backends.cuda.matmul.experts import ExpertMatmuls, Pairs
from realizar.backends.cuda.matmul.fp8 import FP8_ROWS
from realizar.backends.cuda.matmul.grouped_tiles import StepTiles, step_tiles
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, FoldedNorm
from realizar.backends.cuda.matmul.residual import Residual
from realizar.backends.cuda.matmul.routing import ExpertsRead, Router, RouterKernels, split_weights
from realizar.backends.cuda.matmul.tuning_table import ExpertShape
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.models.spec import Experts
from reference_model import ReferenceModel

Array = NDArray[np.float32]
launched: Counter[str] = Counter()  # kernels that ran
_FUSED_PAIRS = 20  # of a step; with more, down is a launch of its own
_FEW_PAIRS = 40  # with more, gate and up read rows as those that are laid in tiles


def _matrix(stack: PackedExperts, expert: int) -> Array:
    """The weights of an expert, which was packed by itself or with all."""
    at = stack.weights.data_ptr()
    found = _floats.get(at + expert * stack.stride)
    if found is None or len(found) != stack.out_features:
        found = _floats[at][expert * stack.out_features : (expert + 1) * stack.out_features]
    return found


def _num_experts(chosen: list[int]) -> int:
    return len(set(chosen) - {-1})


def _bias(bias: torch.Tensor | None, expert: int) -> Array:
    """The biases of an expert's out_features, or one zero for all."""
    return np.zeros(1, np.float32) if bias is None else bias[expert].numpy()


class HostExpertMatmuls(ExpertMatmuls):
    """A stand-in for the mat-vec of pairs."""

    def prepare(self, mixtures: Iterable[Any]) -> None: ...

    def _launch(
        self, stack: PackedExperts, bias: torch.Tensor | None, activation: Any, source: ActivationBuffer, pairs: Pairs,
        target: tuple[int, int, int], tokens: int, per_input: int, norm: FoldedNorm | None,
    ) -> None:  # fmt: skip
        launched[f"pairs {'folded' if norm else 'whole'}"] += 1
        count = tokens * pairs.per_token
        x = decoded(source.with_norm(norm), count // per_input, stack.in_features)
        out, terms, factors = target
        if factors:
            self.experts_read.counts[stack.shared] += torch.tensor([_num_experts(pairs.chosen[:count].tolist()), 1])
        for pair, expert in enumerate(pairs.chosen[:count].tolist()):
            if expert < 0:
                continue
            sums = x[pair // per_input][None] @ _matrix(stack, expert).T + _bias(bias, expert)
            if activation is None:
                factor = pairs.weights[pair].item() if factors else 1.0
                _array(out + 4 * pair * stack.out_features, np.float32, stack.out_features)[:] = sums[0] * factor
            else:
                width = stack.out_features // 2
                _write_int8(_activated(activation, sums), out + pair * width, terms + pair * width // 2)

    def add(
        self, stack: PackedExperts, bias: torch.Tensor | None, source: ActivationBuffer, pairs: Pairs,
        residual: Residual, tokens: int,
    ) -> None:  # fmt: skip
        launched["sums"] += 1
        assert residual.bias is None
        chosen = pairs.chosen[: tokens * pairs.per_token].tolist()
        self.experts_read.counts[stack.shared] += torch.tensor([_num_experts(chosen), 1])
        x = decoded(source, len(chosen), stack.in_features)
        sums = np.zeros((tokens, stack.out_features), np.float32)
        for pair, expert in enumerate(chosen):
            if expert >= 0:
                own = x[pair] @ _matrix(stack, expert).T + _bias(bias, expert)
                sums[pair // pairs.per_token] += pairs.weights[pair].item() * own
        addresses = (0, 0) if residual.target is None else residual.target.addresses
        weight, square_sums = residual.norm_weight, residual.square_sums
        _join(
            sums, residual.hidden.data_ptr(), 0, residual.scale, 0 if weight is None else weight.data_ptr(), *addresses,
            square_sums.data_ptr(), int(square_sums.shape[1]),
        )  # fmt: skip


def expected_choices(part: Experts, scores: Array, selection: torch.Tensor | None) -> NDArray[np.int64]:
    """[tokens, experts per token] that the specification's twin chooses."""
    tensors = {} if selection is None else {part.selection_bias: selection.cpu().numpy()}
    reference = ReferenceModel.__new__(ReferenceModel)
    reference.dtype, reference._tensors = np.dtype(np.float32), tensors  # type: ignore[assignment]
    return reference._choose(part, scores)


class HostRouters(RouterKernels):
    """A stand-in for the choice of up to `MANY_TOKENS`."""

    def prepare(self, routers: Iterable[Router]) -> None: ...

    def halves(self, experts: Experts, weights: torch.Tensor) -> torch.Tensor:
        return split_weights(weights[: experts.num_experts])

    def score(self, router: Router, hidden: torch.Tensor, scores: torch.Tensor) -> None:
        launched["scored"] += 1
        super().score(router, hidden, scores)

    def columns(self, key: object, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def launch(
        self, router: Router, hidden: torch.Tensor, header: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor,
        weights: torch.Tensor, tokens: int,
    ) -> None:  # fmt: skip
        launched["routed"] += 1
        part, x = router.experts, hidden[:tokens]
        sums = x / torch.sqrt(x.square().mean(dim=1, keepdim=True) + router.eps) @ router.weights.T
        if router.bias is not None:
            sums = sums + router.bias
        sums, gates = sums[:, : part.num_experts], sums[:, part.num_experts :]
        scores.view(-1)[: sums.numel()] = sums.reshape(-1)
        shares = torch.softmax(sums, dim=1) if part.scoring == "softmax" else torch.sigmoid(sums)
        ids = torch.from_numpy(expected_choices(part, shares.numpy(), router.selection))
        found = torch.gather(shares, 1, ids)
        ids[int(header[1]) :] = -1
        if part.normalized:
            found = found / found.sum(dim=1, keepdim=True)
        if router.scales is not None:
            found = found * router.scales[ids.clamp(min=0)]
        found = found * part.scale
        if router.shared:
            launched[f"shared, {'gate' if router.shared == 2 else 'whole'}"] += 1
            last = torch.full((tokens, 1), part.num_experts)
            last[int(header[1]) :] = -1
            ids = torch.cat([ids, last], dim=1)
            found = torch.cat([found, torch.sigmoid(gates) if router.shared == 2 else torch.ones(tokens, 1)], dim=1)
        chosen[: ids.numel()] = ids.reshape(-1).int()
        weights[: found.numel()] = found.reshape(-1)


class HostConfig(NamedTuple):
    activation: Any
    halves: bool
    lays: bool


class HostGrouped:
    """A stand-in for `GroupedMatmuls`, whose tiles are rows of pairs."""

    lines = ()

    def __init__(self, _matmuls: object, experts_read: ExpertsRead, fp8_pairs: int) -> None:
        self._experts_read, self.fp8_pairs = experts_read, fp8_pairs
        self._chosen: list[int] = []
        self._gated: dict[int, Array] = {}

    def step(self, rows: int, per_token: int, shape: ExpertShape, shared: int) -> StepTiles:
        return step_tiles(rows, per_token, shape, True, shared=shared, fp8_pairs=self.fp8_pairs)

    def route(
        self, step: StepTiles, stack: PackedExperts, activation: Any = None, tiled: bool = False, halves: bool = False
    ) -> HostConfig:
        assert (activation is None) == tiled
        return HostConfig(activation or "down", halves, activation is not None and step.pairs > _FEW_PAIRS)

    def fuse(self, step: StepTiles, gate_up: PackedExperts, down: PackedExperts, activation: Any) -> HostConfig | None:
        return self.route(step, gate_up, activation) if step.pairs <= _FUSED_PAIRS else None

    def launch_fused(
        self, stacks: tuple[PackedExperts, PackedExperts], biases: tuple[torch.Tensor | None, torch.Tensor | None],
        x: ActivationBuffer, pairs: Pairs, step: StepTiles, buffers: object, config: HostConfig, out: torch.Tensor,
    ) -> None:  # fmt: skip
        launched["fused"] += 1
        self.sort(pairs.chosen, step, stacks[0].count, buffers)
        self.launch_gated(stacks[0], x, pairs.per_token, step, buffers, config, biases[0])
        down = self.route(step, stacks[1], tiled=True)
        self.launch_pairs(stacks[1], None, 1, step, buffers, down, out, pairs.weights, biases[1])

    def prepare(self, wanted: Iterable[Any], experts: int) -> None: ...

    def sort(self, chosen: torch.Tensor, step: StepTiles, experts: int, buffers: object) -> None:
        self._chosen, self._gated = chosen[: step.pairs].tolist(), {}
        self._experts_read.counts[int(step.shared > 0)] += torch.tensor([_num_experts(self._chosen), 1])

    def launch_gated(
        self, stack: PackedExperts, x: ActivationBuffer, per_token: int, step: StepTiles, buffers: object, config: Any,
        bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        launched["grouped in 8-bit floats" if step.in_fp8 else "grouped"] += 1
        assert (x.format == FP8_ROWS) == step.in_fp8
        rows = decoded(x, step.pairs // per_token, stack.in_features)
        for pair, expert in enumerate(self._chosen):
            if expert >= 0:
                sums = rows[pair // per_token][None] @ _matrix(stack, expert).T + _bias(bias, expert)
                gated = _activated(config.activation, sums)
                if step.in_fp8:
                    gated = FP8Values.of(torch.from_numpy(gated)).floats().float().numpy()
                self._gated[pair] = gated[0]

    def launch_pairs(
        self, stack: PackedExperts, x: None, per_token: int, step: StepTiles, buffers: object, config: Any,
        out: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        launched["halves"] += config.halves
        for pair, values in self._gated.items():
            sums = _matrix(stack, self._chosen[pair]) @ values + _bias(bias, self._chosen[pair])
            out[pair] = torch.from_numpy(sums) * weights[pair] / (HALF_FACTOR.value if config.halves else 1)


def run_packed_experts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have mixtures run by these twins, beside `run_packed`, and return the record of launches."""
    monkeypatch.setattr(load, "ExpertMatmuls", HostExpertMatmuls)
    monkeypatch.setattr(load, "RouterKernels", HostRouters)
    monkeypatch.setattr(grouped_matmuls, "GroupedMatmuls", HostGrouped)
    launched.clear()
    return launched
