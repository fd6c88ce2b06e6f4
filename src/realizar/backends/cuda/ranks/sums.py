"""`RankSums`: a step's sums over the ranks of a model, through their memory or by calls of a `RankGroup`. torch."""

from __future__ import annotations

from typing import Protocol

import torch

from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.cuda.ranks.peers import PeerMemory, PeerSums, Sums, branch_places, peer_bytes
from realizar.backends.cuda.step_arrays import StepSizes
from realizar.backends.resolved_config import ResolvedConfig
from realizar.models.spec import ModelSpec


class RankGroup(Protocol):
    """All ranks of a model; each makes the same calls, those about tensors on the stream of its steps."""

    def share(self, num_bytes: int) -> PeerMemory | None:
        """Memory of each rank that all others' GPUs write, in loads. None where one can't; the group then adds up."""

    def add_up(self, values: torch.Tensor, total: torch.Tensor) -> None:
        """total = the sum of all ranks' values, float32, the same bits on all. Both are contiguous, and may be one."""

    def gather(self, own: torch.Tensor, all_values: torch.Tensor) -> None:
        """all_values [ranks, ...] = each rank's own, float32; both are contiguous."""

    def least(self, own: int) -> int:
        """The least of all ranks' numbers, in loads."""

    def end_load(self) -> None:
        """Nobody waits long any more for a rank that sends nothing."""

    def close(self) -> None:
        """Free what the group has, once no graph has its sums any more."""


class RankSums(Protocol):
    """What a step's matmuls leave as parts of sums, added up over their splits and over ranks.

    `launching`: options of the step's kernels.
    """

    def of_branch(self, place: int, turn: int, own: Sums, launching: dict[str, bool], *, by_blocks: bool) -> Sums:
        """Of a branch, at one of two places: what its norm reads, by programs of a token's blocks or of whole tokens.

        Neighbours have other turns. One rank alone has the bias.
        """

    def of_stream(self, hidden: torch.Tensor, launching: dict[str, bool]) -> None:
        """Add up embeddings, float32 [tokens, hidden_size], of which each is zeros on all ranks but one."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of all ranks' values, float32 [tokens, 1 or 2] and contiguous, which are overwritten."""

    def of_logits(self, own: Sums, launching: dict[str, bool]) -> Sums:
        """Those of all ids, from the sums of this rank's, float32 [splits, tokens, ids]."""


def make_sums(
    group: RankGroup | None, spec: ModelSpec, config: ResolvedConfig, sizes: StepSizes, device: torch.device
) -> RankSums | None:  # fmt: skip
    """Those of steps of such sizes, through memory that GPUs write of each other where all can; of no group None."""
    if group is None:
        return None
    memory = group.share(peer_bytes(spec, sizes.tokens, sizes.selected))
    if memory is None:
        return GroupSums(group, spec, sizes.tokens, sizes.selected, device)
    return PeerSums(memory, spec, sizes.tokens, sizes.selected, exactly=config.batch_invariant)


def sums_bytes(spec: ModelSpec, tokens: int, selected: int) -> int:
    """Bytes of the `RankSums` of a model, or of a rank's part of it, at most."""
    if spec.share.ranks == 1:
        return 0
    of_group = sum(each.nbytes for each in _buffers(spec, tokens, selected, torch.device("meta")))
    return max(of_group, peer_bytes(spec, tokens, selected))


class GroupSums:
    """`RankSums` through calls of a group."""

    def __init__(self, group: RankGroup, spec: ModelSpec, tokens: int, selected: int, device: torch.device) -> None:
        self._group, self._spec = group, spec
        self._totals, self._own, self._parts, self._logits = _buffers(spec, tokens, selected, device)

    def of_branch(self, place: int, turn: int, own: Sums, launching: dict[str, bool], *, by_blocks: bool) -> Sums:
        partials = own.partials
        total = self._totals[place, : partials.shape[1]]
        only = partials[0]
        if len(partials) > 1 or own.bias is not None or only.dtype != total.dtype or not only.is_contiguous():
            _finish(own, total)
            only = total
        self._group.add_up(only, total)
        return Sums(total[None], 1)

    def of_stream(self, hidden: torch.Tensor, launching: dict[str, bool]) -> None:
        self._group.add_up(hidden, hidden)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        self._group.add_up(values, values)
        return values.div_(self._spec.share.ranks)

    def of_logits(self, own: Sums, launching: dict[str, bool]) -> Sums:
        _, tokens, ids = own.partials.shape
        part = self._own[:tokens]
        _finish(own, part[:, :ids])
        parts = self._parts[: len(self._parts) // self._own.shape[0] * tokens].view(-1, *part.shape)
        self._group.gather(part, parts)
        logits = self._logits[:tokens]
        logits.view(tokens, len(parts), -1).copy_(parts.transpose(0, 1))
        return Sums(logits[None, :, : self._spec.vocab_size], 1)


def _buffers(spec: ModelSpec, tokens: int, selected: int, device: torch.device) -> list[torch.Tensor]:
    """Sums of the stream at one or two places, and logits: of this rank, of all by rank, and of all by id."""
    ranks = spec.share.ranks
    ids = -(-spec.vocab_size // ranks)
    stream = branch_places(spec), tokens, spec.hidden_size
    shapes = stream, (selected, ids), (ranks * selected * ids,), (selected, ranks * ids)
    return [torch.zeros(shape, device=device) for shape in shapes]


def _finish(own: Sums, total: torch.Tensor) -> None:
    partials = own.partials
    if partials.dtype == torch.float16:
        total.copy_(partials.float().sum(0).mul_(HALF_FACTOR.value))
    else:
        torch.sum(partials, 0, out=total) if total.is_contiguous() else total.copy_(partials.sum(0))
    if own.bias is not None:
        total.add_(own.bias)
