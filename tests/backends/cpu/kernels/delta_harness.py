"""Gated delta nets run by the CPU's kernels alone, step by step, and by the reference model."""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from backends.cpu.kernels.kernel_calls import call, poisoned
from realizar.backends.cpu.codegen.recurrence import head_lanes, run_columns
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernels.attention_record import STEP_ROWS
from realizar.backends.cpu.kernels.delta_net import (
    DELTA_NET,
    delta_scratch_bytes,
    make_mix,
    make_recur,
)
from realizar.backends.cpu.state.rows import FIRST, IS_NEW, REPLAYED, SLOT, STATE_ROW_FIELDS, TOKENS, UNCERTAIN
from realizar.backends.cpu.state.sizes import convolved_width
from realizar.models.mixers import GatedDeltaNet
from realizar.models.parts import Linear, Norm
from realizar.models.spec import ModelSpec
from reference_model import ReferenceModel

EPS = 1e-6
MOST_UNCERTAIN = 4
_KERNELS: dict[tuple[int, int], Any] = {}


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
    """The kernels over a state and a replay buffer for each row.

    Args:
        threads: that share a step; they run one after the other.
        lanes: of a vector; as many as the heads and this processor have by default.
    """

    def __init__(
        self, part: GatedDeltaNet, vectors: dict[str, NDArray[np.float32]], *, rows: int = 1, threads: int = 1,
        lanes: int = 0,
    ) -> None:  # fmt: skip
        self.part, self.vectors, self.threads = part, vectors, threads
        lanes = lanes or head_lanes((part.key_size, part.value_size), select().lanes)
        self._columns = columns = run_columns(part.value_size, lanes)
        if (lanes, columns) not in _KERNELS:
            _KERNELS[lanes, columns] = make_mix(lanes), make_recur(lanes, columns)
        self._mix, self._recur = (kernel.address for kernel in _KERNELS[lanes, columns])
        values, padded = part.num_value_heads * part.value_size, -(-part.num_value_heads // 32) * 32
        self._places = np.cumsum([part.channels, values, padded, padded]).tolist()  # of z, beta, decay, and the end
        self.replays = poisoned(rows, MOST_UNCERTAIN, part.channels + 2 * part.num_value_heads)
        before, shape = (part.length - 1) * part.channels, (part.value_size // columns, part.key_size, columns)
        self.slots = poisoned(rows, before + part.num_value_heads * math.prod(shape))
        self._matrices = self.slots.ctypes.data + before * 4
        self.state = self.slots[:, before:].reshape(rows, part.num_value_heads, *shape)
        self.base = [0] * rows

    def step(
        self, rows: Sequence[tuple[int, int, NDArray[np.float32]]], uncertain: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Outputs of all tokens.

        Args:
            rows: slot, position of the first token, inputs of the tokens.
            uncertain: last tokens of each row.
        """
        part, fields, tokens, places = self.part, np.zeros((len(rows), STATE_ROW_FIELDS), np.int64), 0, 0
        for index, (slot, position, inputs) in enumerate(rows):
            replayed, unsure = position - self.base[slot] if position else 0, uncertain[index] if uncertain else 0
            row = {FIRST: tokens, TOKENS: len(inputs), SLOT: slot, IS_NEW: position == 0, REPLAYED: replayed}
            for field, value in {**row, UNCERTAIN: unsure}.items():
                fields[index, field] = value
            tokens, places = tokens + len(inputs), places + replayed + len(inputs)
            self.base[slot] = position + len(inputs) - unsure
        laid = poisoned(tokens, self._places[3])
        for (first, *_), (_, _, inputs) in zip(fields, rows, strict=True):
            self._lay(laid[first : first + len(inputs)], inputs)
        out = poisoned(tokens, part.num_value_heads * part.value_size)
        self._run(fields, laid, places, out)
        return out

    def _run(
        self, fields: NDArray[np.int64], inputs: NDArray[np.float32], places: int, out: NDArray[np.float32]
    ) -> None:
        part, step = self.part, np.zeros(8, np.int64)
        step[STEP_ROWS] = len(fields)
        mixed = poisoned(places, convolved_width(part))
        scratch = np.zeros((self.threads, delta_scratch_bytes(part.key_size, self._columns)), np.uint8)
        zeros = np.zeros(part.channels, np.float32)
        taps = np.ascontiguousarray(self.vectors["kernel"].T)
        for kernel in (self._mix, self._recur):
            call(
                kernel, DELTA_NET, self.threads, step=step, rows=fields, inputs=inputs, inputs_stride=inputs.strides[0],
                gate_column=self._places[0], beta_column=self._places[1], decay_column=self._places[2],
                key_heads=part.num_key_heads, value_heads=part.num_value_heads, key_size=part.key_size,
                value_size=part.value_size, length=part.length, tiled=int(part.tiled), taps=taps,
                decay_bias=self.vectors["decay_bias"], rate=self.vectors["rate"], states=self.slots,
                slot_bytes=self.slots.strides[0], matrices=self._matrices, replays=self.replays,
                replay_bytes=self.replays.strides[0], token_bytes=self.replays.strides[1], mixed=mixed,
                mixed_stride=mixed.strides[0], zeros=zeros, weight=self.vectors["norm"], eps=EPS, scratch=scratch,
                scratch_bytes=scratch.strides[0], out=out, out_stride=out.strides[0], records=0, records_groups=0,
                records_width=1,
            )  # fmt: skip

    def whole_state(self, slot: int) -> NDArray[np.float32]:
        """float32 [value heads, key_size, value_size]."""
        runs = np.ascontiguousarray(self.state[slot].transpose(0, 2, 1, 3))
        return cast("NDArray[np.float32]", runs.reshape(self.part.num_value_heads, self.part.key_size, -1))

    def _lay(self, rows: NDArray[np.float32], inputs: NDArray[np.float32]) -> None:
        beta, decay, heads = self._places[1], self._places[2], self.part.num_value_heads
        rows[:, :beta] = inputs[:, :beta]  # q k v z
        rows[:, beta : beta + heads] = inputs[:, beta : beta + heads]
        rows[:, decay : decay + heads] = inputs[:, beta + heads :]
