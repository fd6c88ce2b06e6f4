"""`CPUTower` runs an encoder of images on the CPU, by the kernels of text models."""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.bind import Binder
from realizar.backends.cpu.bind_kv import AttentionBinder, RopeTables
from realizar.backends.cpu.bind_state import StateBinder
from realizar.backends.cpu.compile_ahead import CompileAhead
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.attention_record import STEP_ROWS, STEP_TERMS, STEP_TOKENS
from realizar.backends.cpu.kernels.attention_segment import scratch_bytes
from realizar.backends.cpu.kv.pictures import PictureKeys, most_windows
from realizar.backends.cpu.operations import BoundProgram, kernels_of, make_tables
from realizar.backends.cpu.records import aligned_zeros
from realizar.backends.cpu.state.memory import StateMemory
from realizar.backends.cpu.state.sizes import state_sizes
from realizar.backends.cpu.threads import TEAM_KERNELS, ThreadTeam
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.weights.pack import no_bytes
from realizar.backends.cpu.workspace import Workspace, kept_stream
from realizar.backends.devices import THE_CPU
from realizar.backends.parts import places_between, squares_of
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import StepError
from realizar.models.check_tensors import check_tensors
from realizar.models.tower import Standard, Tower


class CPUTower:
    """A packed tower, which encodes a picture at a time; threads may share it.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, or not finite.
        UnsupportedModelError: a tensor's type does not run.
    """

    def __init__(self, tower: Tower, checkpoint: Checkpoint, threads: int) -> None:
        check_tensors(tower, checkpoint)
        self.tower = tower
        config, instructions = _config(tower, checkpoint, threads), select(None)
        ordered = WeightTensors(tower, checkpoint).widest_ordered()
        self._space = Workspace(tower, config, instructions.tile_tokens[0], ordered)
        self._weights = Weights(tower, checkpoint, instructions.lanes, threads)
        self._weights.reserve(tower.matrices())
        self._keys, self._ropes = PictureKeys(tower, config.kv_dtype), RopeTables(tower, tower.max_tokens)
        padded = max(layout.padded_head_size for layout in self._keys.layouts.values())
        self._scratch = aligned_zeros((threads, -(-scratch_bytes(padded) // 64) * 64), np.uint8)
        self._partial = aligned_zeros(0, np.float32)  # no row is split
        kernels = KernelLibrary(instructions)
        self._windows = aligned_zeros(8, np.int64), aligned_zeros(self._space.rows.shape, np.int64)
        attention = AttentionBinder(
            kernels, self._weights, self._space, self._keys, self._ropes, self._scratch, self._partial, self._windows
        )
        states = StateMemory(state_sizes(tower, 0), 1, 0, 0)
        state_binder = StateBinder(instructions, kernels, self._weights, self._space, states)
        binder = Binder(instructions, kernels, self._weights, self._space, attention, state_binder)
        self._first, self._body, self._projectors = binder.bind_tower(tower)
        programs = self._first, self._body, *self._projectors
        with CompileAhead([*kernels_of(programs), *TEAM_KERNELS], threads, lambda _: None):
            self._weights.load(tower.matrices(), lambda _: None)
        make_tables(programs)
        self._team, self._lock = ThreadTeam(threads), threading.Lock()
        weakref.finalize(self, self._team.close)

    @staticmethod
    def planned_bytes(tower: Tower, checkpoint: Checkpoint) -> tuple[int, int]:
        """Bytes of the weights, and what else the largest picture takes, from headers alone; raises as a load does."""
        check_tensors(tower, checkpoint)
        config, instructions = _config(tower, checkpoint, threads=1), select(None)
        weights = Weights(tower, checkpoint, instructions.lanes, threads=1)
        weights.reserve(tower.matrices(), no_bytes)
        ordered = WeightTensors(tower, checkpoint).widest_ordered()
        space = Workspace(tower, config, instructions.tile_tokens[0], ordered)  # never written: it costs nothing
        return weights.size_bytes, space.size_bytes + PictureKeys(tower, config.kv_dtype).size_bytes

    @property
    def size_bytes(self) -> int:
        """Of the weights; what else it takes grows with the largest picture."""
        return self._weights.size_bytes

    def encode(self, patches: NDArray[np.float32]) -> NDArray[np.float32]:
        """The features of a picture, float32 [squares, features], row by row, those of all projectors side by side.

        `patches` are float32 [rows, columns, 3 * frames * patch_size ** 2]. StepError: the features are not finite.
        """
        tower, (rows, columns, width) = self.tower, patches.shape
        count = rows * columns
        with self._lock:
            windows = self._keys.place(rows, columns, self._space.slots, self._space.block_tables)
            order = np.concatenate(windows)
            self._buffer("patches", count, width)[:] = patches.reshape(count, width)[order]
            self._ropes.fill(np.indices((rows, columns), np.int32).reshape(2, count)[:, order])
            self._window_rows([len(window) for window in windows])
            self._walk(self._first, count)
            if tower.positions is not None:
                hidden = self._buffer("hidden", count, tower.hidden_size)
                hidden += self._places(tower.positions, rows, columns)[order]
            self._walk(self._body, self._with_class_token(count))
            sources = ["normed", *(kept_stream(place) for place in range(len(tower.deepstack)))]
            found = []
            for source, projector, program in zip(sources, tower.projectors, self._projectors, strict=True):
                encoded = np.empty((count, tower.hidden_size), np.float32)
                encoded[order] = self._buffer(source, count, tower.hidden_size)
                squares = squares_of(encoded.reshape(rows, columns, -1), tower.merge, projector)
                if projector.standard is not None:
                    squares = self._standardized(squares, projector.standard)
                self._buffer("squares", len(squares), squares.shape[1])[:] = squares
                self._walk(program, len(squares))
                found.append(self._buffer("features", len(squares), projector.num_features).copy())
        features: NDArray[np.float32] = np.concatenate(found, axis=1)
        if not np.isfinite(features).all():
            raise StepError(f"the features of a picture of {rows} x {columns} patches are not finite")
        return features

    def _with_class_token(self, count: int) -> int:
        """Write what stands behind so many patches; the number of tokens then."""
        name, positions = self.tower.class_token, self.tower.positions
        if name is None:
            return count
        written = self._buffer("hidden", count + 1, self.tower.hidden_size)[count:]
        written[:] = 0
        if positions is not None:
            self._weights.rows(positions, np.zeros(1, np.int32), written)
        written += self._weights.vector(name)[: self.tower.hidden_size]
        return count + 1

    def _places(self, name: str, rows: int, columns: int) -> NDArray[np.float32]:
        """What a tower adds to patches by their place, row by row, from the table of that name."""
        side, hidden, stretches = self.tower.side, self.tower.hidden_size, self.tower.stretches

        def table(first: int, count: int) -> NDArray[np.float32]:
            found = np.empty((count, hidden), np.float32)
            self._weights.rows(name, np.arange(first, first + count, dtype=np.int32), found)
            return found

        if self.tower.by_axis:
            return (table(0, columns) + table(side, rows)[:, None]).reshape(-1, hidden)
        if stretches is None or (rows, columns) == (side, side):
            return table(self.tower.max_tokens - self.tower.max_patches, rows * columns)
        down = places_between(stretches, rows, side) @ table(0, side * side).reshape(side, -1)
        across = places_between(stretches, columns, side) @ down.reshape(rows, side, -1)
        return across.reshape(-1, hidden)

    def _standardized(self, x: NDArray[np.float32], standard: Standard) -> NDArray[np.float32]:
        y = x * np.float32(standard.scale)
        if standard.shift is not None:
            y -= self._weights.vector(standard.shift)[: x.shape[1]]
        if standard.factor is not None:
            y *= self._weights.vector(standard.factor)[: x.shape[1]]
        return y / np.sqrt(np.square(y).mean(axis=1, keepdims=True) + np.float32(standard.eps))

    def _buffer(self, name: str, tokens: int, width: int) -> NDArray[np.float32]:
        return self._space.buffers[name].values[:tokens, :width]

    def _window_rows(self, lengths: list[int]) -> None:
        step, rows = self._windows
        step[STEP_TOKENS], step[STEP_ROWS] = sum(lengths), len(lengths)
        rows[: len(lengths), 0], rows[: len(lengths), 1] = np.cumsum([0, *lengths[:-1]]), lengths

    def _walk(self, program: BoundProgram, tokens: int) -> None:
        step = self._space.step
        step[STEP_TOKENS], step[STEP_TERMS], step[STEP_ROWS] = tokens, 2 * tokens, 1
        self._space.rows[0] = 0, tokens, 0
        self._team.run(program.at, program.count)


def _config(tower: Tower, checkpoint: Checkpoint, threads: int) -> ResolvedConfig:
    """A row of a picture's patches, or of each of its windows."""
    kv_dtype = "f32" if WeightTensors(tower, checkpoint).are_float32(tower.matrices()) else "f16"
    return ResolvedConfig(
        threads=threads, context_length=tower.max_tokens, max_running=most_windows(tower),
        max_step_tokens=tower.max_tokens, speculative_tokens=0, chosen=THE_CPU, kv_dtype=kv_dtype, queue_length=0,
        steps_in_flight=1, tile_tokens=1, stretch=1.0, hidden_layers=tuple(layer for layer, _ in tower.deepstack),
    )  # fmt: skip
