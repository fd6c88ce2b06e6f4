"""Gated delta nets run by the CPU's kernels alone, step by step, and by the reference model."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from backends.cpu.kernels.kernel_calls import call, poisoned
from realizar.backends.cpu.codegen.recurrence import run_columns
from realizar.backends.cpu.instruction_set import index_of, select
from realizar.backends.cpu.kernels.attention_record import STEP_ROWS
from realizar.backends.cpu.kernels.delta_net import (
    DELTA_NET,
    STATE_ROW_FIELDS,
    delta_scratch_bytes,
    make_mix,
    make_recur,
    mixed_width,
)
from realizar.models.mixers import GatedDeltaNet
from realizar.models.spec import Linear, ModelSpec, Norm
from reference_model import ReferenceModel

EPS = 1e-6
MOST_UNCERTAIN = 4
_KERNELS: dict[tuple[str, int, int], Any] = {}


def delta_net(
    key_heads: int, value_heads: int, key_size: int = 16, value_size: int = 16, *, tiled: bool = False
) -> GatedDeltaNet:
    """A gated delta net whose matrices take their outputs from the columns of its input, in order."""
    sizes = {
        "q": key_heads * key_size, "k": key_heads * key_size, "v": value_heads * value_size,
        "z": value_heads * value_size, "beta": value_heads, "decay": value_heads,
    }  # fmt: skip
    features = sum(sizes.values())
    linears = {name: Linear(name, size, features) for name, size in sizes.items()}
    outputs = value_heads * value_size
    return GatedDeltaNet(
        key_heads, value_heads, key_size, value_size, 4, linears["q"], linears["k"], linears["v"], linears["z"],
        linears["beta"], linears["decay"], "kernel", "decay_bias", "rate", Norm("rms", EPS, "norm"),
        Linear("out", outputs, outputs), tiled=tiled,
    )  # fmt: skip


def random_vectors(part: GatedDeltaNet, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Kernel, decays' biases and rates, and weights of the norm."""
    rng = np.random.default_rng(seed)
    vectors = {
        "kernel": rng.standard_normal((part.channels, part.length)) / 2,
        "decay_bias": rng.standard_normal(part.num_value_heads),
        "rate": -rng.uniform(0.02, 2.0, part.num_value_heads),
        "norm": 1 + rng.standard_normal(part.value_size) / 4,
    }
    return {name: values.astype(np.float32) for name, values in vectors.items()}


def random_inputs(part: GatedDeltaNet, tokens: int, seed: int = 1) -> NDArray[np.float32]:
    """float32 [tokens, q k v z beta decay]: what the matmuls give."""
    width = part.q.in_features
    return 2 * np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


def reference(
    part: GatedDeltaNet, vectors: dict[str, NDArray[np.float32]], inputs: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Outputs [tokens, value heads * value size], and the last state, in float64."""
    tensors: dict[str, NDArray[Any]] = dict(vectors)
    column = 0
    for linear in part.inputs():
        tensors[linear.weight] = np.eye(linear.out_features, linear.in_features, column)
        column += linear.out_features
    tensors["out"] = np.eye(part.out.out_features)
    spec = cast("ModelSpec", types.SimpleNamespace(tensors=tensors))
    outputs, (_, state) = ReferenceModel(spec, tensors, np.float64).mixer(part, inputs.astype(np.float64), None)
    return outputs, state


class DeltaNetKernels:
    """The kernels over a window and a state for each row.

    Args:
        threads: that share a step; they run one after the other.
        instructions: name of an instruction set; the best that there is by default.
    """

    def __init__(
        self, part: GatedDeltaNet, vectors: dict[str, NDArray[np.float32]], *, rows: int = 1, threads: int = 1,
        instructions: str | None = None,
    ) -> None:  # fmt: skip
        self.part, self.vectors, self.threads = part, vectors, threads
        chosen = select(instructions)
        self._columns = columns = run_columns(part.value_size, chosen.lanes)
        key = chosen.name, columns, 0
        if key not in _KERNELS:
            _KERNELS[key] = make_mix(index_of(chosen.name)), make_recur(index_of(chosen.name), columns)
        self._mix, self._recur = (kernel.address for kernel in _KERNELS[key])
        padded = -(-part.num_value_heads // 32) * 32
        self._places = np.cumsum([0, part.channels, padded, padded]).tolist()  # of q k v, beta, decay and z
        self.window = poisoned(rows, part.length - 1 + MOST_UNCERTAIN, self._places[3])
        self.state = poisoned(rows, part.num_value_heads, part.value_size // columns, part.key_size, columns)
        self.base = [0] * rows

    def step(
        self, rows: Sequence[tuple[int, int, NDArray[np.float32]]], uncertain: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Outputs of all tokens.

        Args:
            rows: slot, position of the first token, inputs of the tokens.
            uncertain: last tokens of each row.
        """
        part, columns, tokens = self.part, np.zeros((len(rows), STATE_ROW_FIELDS), np.int64), 0
        place = 0
        for index, (slot, position, inputs) in enumerate(rows):
            replayed, unsure = position - self.base[slot] if position else 0, uncertain[index] if uncertain else 0
            columns[index] = tokens, len(inputs), slot, position == 0, replayed, unsure, place
            tokens, place = tokens + len(inputs), place + replayed + len(inputs)
            self.base[slot] = position + len(inputs) - unsure
        width = self._places[3] + part.num_value_heads * part.value_size
        laid = poisoned(tokens, width)
        for (first, *_), (_, _, inputs) in zip(columns, rows, strict=True):
            self._lay(laid[first : first + len(inputs)], inputs)
        out = poisoned(tokens, part.num_value_heads * part.value_size)
        width = mixed_width(part.num_key_heads, part.num_value_heads, part.key_size, part.value_size)
        step, mixed = np.zeros(8, np.int64), poisoned(place, width)
        step[STEP_ROWS] = len(rows)
        scratch = np.zeros((self.threads, delta_scratch_bytes(part.key_size, self._columns)), np.uint8)
        taps = np.ascontiguousarray(self.vectors["kernel"].T)
        zeros = np.zeros(self._places[3], np.float32)
        for kernel in (self._mix, self._recur):
            call(
                kernel, DELTA_NET, self.threads, step=step, rows=columns, inputs=laid,
                inputs_stride=laid.strides[0], beta_column=self._places[1], decay_column=self._places[2],
                gate_column=self._places[3], window_width=self._places[3], key_heads=part.num_key_heads,
                value_heads=part.num_value_heads, key_size=part.key_size, value_size=part.value_size,
                length=part.length, tiled=int(part.tiled), taps=taps, decay_bias=self.vectors["decay_bias"],
                rate=self.vectors["rate"], window=self.window, window_slot_bytes=self.window.strides[0],
                state=self.state, state_slot_bytes=self.state.strides[0], mixed=mixed, mixed_stride=mixed.strides[0],
                zeros=zeros, weight=self.vectors["norm"], eps=EPS, scratch=scratch, scratch_bytes=scratch.strides[0],
                out=out, out_stride=out.strides[0], records=0, records_groups=0, records_width=1,
            )  # fmt: skip
        return out

    def whole_state(self, slot: int) -> NDArray[np.float32]:
        """float32 [value heads, key_size, value_size]."""
        runs = np.ascontiguousarray(self.state[slot].transpose(0, 2, 1, 3))
        return cast("NDArray[np.float32]", runs.reshape(self.part.num_value_heads, self.part.key_size, -1))

    def _lay(self, rows: NDArray[np.float32], inputs: NDArray[np.float32]) -> None:
        part, starts = self.part, self._places
        channels, values, heads = part.channels, part.num_value_heads * part.value_size, part.num_value_heads
        rows[:, :channels] = inputs[:, :channels]
        rows[:, starts[3] :] = inputs[:, channels : channels + values]
        for start, column in ((starts[1], channels + values), (starts[2], channels + values + heads)):
            rows[:, start : start + heads] = inputs[:, column : column + heads]
