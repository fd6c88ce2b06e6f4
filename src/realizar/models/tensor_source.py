"""`TensorSource`: the place of a canonical tensor in a checkpoint. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from realizar.quantization.source import Run, places_of

TensorName = str


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The place of a canonical tensor: a checkpoint tensor, a range of its out_features, or a stack; or a part of it.

    Attributes:
        name: in the checkpoint; the first of `stack` where there is one.
        shape: expected shape of the canonical tensor, slowest dimension first.
        first_out_feature: of the checkpoint tensor, at which it starts; of each of its matrices where it is a stack.
        fused: the checkpoint tensor (QKV, gate and up) has more out_features than these.
        stack: checkpoint tensors of shape `shape[1:]`, one for each index of the first dimension, where the checkpoint
            keeps experts apart; empty where one tensor holds all.
        stored_shape: shape in the checkpoint where that has dimensions of one beside `shape`; else None.
        step: out_features from the start of one run to that of the next: 2 where gate's and up's alternate.
        run: out_features that lie one after another: a head's, where those of queries and gates alternate by head.
        transposed: the checkpoint holds a matrix, or each of a stack, as [in_features, out_features].
        per_expert: a vector for each expert, [experts, out_features].
        whole: the tensor that this one is a part of, where ranks share it; other fields but `shape` are the same.
        rows, columns: its out_features and columns that these are; None takes all.
    """

    name: str
    shape: tuple[int, ...]
    first_out_feature: int = 0
    fused: bool = False
    stack: tuple[str, ...] = ()
    stored_shape: tuple[int, ...] | None = None
    step: int = 1
    run: int = 1
    transposed: bool = False
    per_expert: bool = False
    whole: TensorSource | None = None
    rows: tuple[Run, ...] | None = None
    columns: tuple[Run, ...] | None = None

    def cut(self, rows: Sequence[Run] | None = None, columns: Sequence[Run] | None = None) -> TensorSource:
        """The part with some out_features and columns, as runs, in their order; None takes all."""
        shape, axis = list(self.shape), self.out_feature_axis
        for runs, at in ((rows, axis), (columns, axis + 1)):
            if runs is not None:
                shape[at] = sum(stop - start for start, stop in runs)
        rows, columns = (None if runs is None else tuple(runs) for runs in (rows, columns))
        return replace(self, shape=tuple(shape), whole=self, rows=rows, columns=columns)

    @property
    def names(self) -> tuple[str, ...]:
        return self.stack or (self.name,)

    @property
    def out_feature_axis(self) -> int:
        """The dimension of out_features in `shape`: the last of vectors, the one before it of matrices and stacks."""
        return len(self.shape) - 1 if self.per_expert else max(len(self.shape) - 2, 0)

    @property
    def last_out_feature(self) -> int:
        """One more than the checkpoint tensor's last out_feature that is one of these."""
        last = self.shape[self.out_feature_axis] - 1
        return self.first_out_feature + last // self.run * self.step + last % self.run + 1

    def out_features(self) -> NDArray[np.intp]:
        """The checkpoint tensor's out_features that these are, in order: intp [out_features]."""
        if self.whole is not None:
            found = self.whole.out_features()
            return found if self.rows is None else found[places_of(self.rows)]
        places = np.arange(self.shape[self.out_feature_axis], dtype=np.intp)
        return self.first_out_feature + places // self.run * self.step + places % self.run
