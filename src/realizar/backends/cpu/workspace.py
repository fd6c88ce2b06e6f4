"""Fixed memory of a step: buffers of rows, and the small arrays through which a step is described to the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.activation_layout import RECORD_BYTES
from realizar.backends.cpu.formats import GROUP
from realizar.backends.cpu.kernels.attention import ROW_FIELDS
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RowBuffer:
    """Rows of float32, and of quantised records beside them.

    Attributes:
        values: float32 [rows, padded width].
        records: uint8 [rows, padded width / 32 * 64], or None where nothing quantised reads it. Those of `normed` are
            twice as wide: the second half is of what the first leaves over (`Binder.two_terms`).
    """

    values: NDArray[np.float32]
    records: NDArray[np.uint8] | None

    @property
    def at(self) -> int:
        return address(self.values)

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return int(self.values.strides[0])

    @property
    def records_at(self) -> int:
        return address(self.records)

    @property
    def records_stride(self) -> int:
        return 0 if self.records is None else int(self.records.strides[0])


def buffer_widths(spec: ModelSpec) -> dict[str, int]:
    """Widest row of every buffer of `program`."""
    attentions = [layer.attention for layer in spec.layers]
    widest = max(layer.feed_forward.up.out_features for layer in spec.layers)
    query = max(a.num_heads * a.head_size for a in attentions)
    key = max(a.num_kv_heads * a.head_size for a in attentions)
    hidden = spec.hidden_size
    return {
        "hidden": hidden, "normed": hidden, "branch": hidden, "query": query, "key": key,
        "value": 2 * (-(-key // GROUP) * GROUP),
        "attended": query, "gate": widest, "up": widest, "activated": widest, "selected": hidden,
        "logits": spec.vocab_size,
    }  # fmt: skip


RECORDED = ("normed", "attended", "activated", "selected")  # buffers that products read


class Workspace:
    """Buffers for at most `max_tokens` tokens and `max_selected` rows of logits."""

    def __init__(self, spec: ModelSpec, max_tokens: int, max_selected: int, max_rows: int, max_blocks: int) -> None:
        self.buffers: dict[str, RowBuffer] = {}
        for name, width in buffer_widths(spec).items():
            rows = max_selected if name in ("selected", "logits") else max_tokens
            padded = -(-width // GROUP) * GROUP
            values = aligned_zeros(rows * padded, np.float32).reshape(rows, padded)
            records = None
            if name in RECORDED:
                terms = 2 if name == "normed" else 1
                records = aligned_zeros(rows * padded // GROUP * RECORD_BYTES * terms, np.uint8).reshape(rows, -1)
            self.buffers[name] = RowBuffer(values, records)  # type: ignore[arg-type]
        groups = len(spec.cache_groups())
        self.step = aligned_zeros(8, np.int64)
        self.rows = aligned_zeros(max_rows * ROW_FIELDS, np.int64).reshape(max_rows, ROW_FIELDS)
        self.selected = aligned_zeros(max_selected, np.int32)
        self.slots = [aligned_zeros(max_tokens, np.int32) for _ in range(groups)]
        self.block_tables = [
            aligned_zeros(max_rows * max_blocks, np.int32).reshape(max_rows, max_blocks) for _ in range(groups)
        ]

    @property
    def size_bytes(self) -> int:
        return sum(buffer.values.nbytes for buffer in self.buffers.values())
