"""Parts of the GPU backend that need neither GPU nor interpreter: merging, sizes, arrays of a step, errors, choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")


from realizar.backends.base import ForwardInput  # noqa: E402
from realizar.backends.cuda.device import interpreter_device  # noqa: E402
from realizar.backends.cuda.graphs import GraphRunner  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.backends.cuda.layouts.fragments import fragment_format  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, InputFormat  # noqa: E402
from realizar.backends.cuda.matmul.linears import MergedLinear  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulConfig  # noqa: E402
from realizar.backends.cuda.shapes import padded_rows, padded_tokens, row_counts, token_counts  # noqa: E402
from realizar.backends.cuda.step_arrays import StepArrays, StepSizes, tiles_of  # noqa: E402
from realizar.backends.cuda.weights.pack import PackedMatrix  # noqa: E402
from realizar.backends.device_choice import gpu_listed  # noqa: E402
from realizar.batch import FROM_PREVIOUS_STEP, StepRows  # noqa: E402
from realizar.quantization.ggml_layouts import Q8_0  # noqa: E402
from step_inputs import scheduled_row, step_input  # noqa: E402

CPU = torch.device("cpu")


@dataclass
class ScriptedMatmuls:
    """Says two splits for everything, and notes what is launched."""

    launched: list[Any] = field(default_factory=list)
    routes: dict[Any, Any] = field(default_factory=dict)

    def activation_format(self, tokens: int, floats: bool = False) -> InputFormat:
        return InputFormat("int8") if tokens < 8 else InputFormat("half", 8)

    def route_merged(self, tokens: int, matrices: list[PackedMatrix], reads_halves: bool = False) -> MatmulConfig:
        return MatmulConfig(None, self.activation_format(tokens), 2)  # type: ignore[arg-type]

    def launch_merged(self, matrices: Any, activations: Any, partials: Any, tokens: int, config: Any) -> None:
        self.launched.append((len(matrices), activations.format.kind, tuple(partials.shape), tokens))

    def launch(self, matrix: Any, activations: Any, partials: Any, tokens: int, config: Any, column: int) -> None:
        self.launched.append((matrix.out_features, column, tokens))
        partials[:, :tokens, column : column + matrix.out_features] = 1.0


def packed(rows: int, cols: int) -> PackedMatrix:
    return PackedMatrix(rows, cols, fragment_format(Q8_0), torch.zeros(1), torch.zeros(1), None)


@pytest.mark.parametrize(("rows", "kind"), [(3, "int8"), (9, "half")])
def test_packed_matrices_run_in_one_grid(rows: int, kind: str) -> None:
    matmuls, buffers = ScriptedMatmuls(), ActivationBuffers(16, CPU)
    linear = MergedLinear([packed(64, 128), packed(32, 128)], None, interpreter_device(), matmuls)  # type: ignore[arg-type]
    partials = torch.zeros(linear.splits(StepKind(rows)), rows, linear.width)
    linear.launch(StepKind(rows), buffers.get, partials)
    assert matmuls.launched == [(2, kind, (2, rows, 96), rows)]
    assert len(linear.input_formats(StepKind(rows))) == 1


def test_floats_beside_packed_matrices_fill_the_first_split() -> None:
    matmuls, buffers = ScriptedMatmuls(), ActivationBuffers(4, CPU)
    weights = torch.randn(24, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    linear = MergedLinear([packed(8, 128), weights], None, interpreter_device(), matmuls)  # type: ignore[arg-type]
    assert [form.kind for form in linear.input_formats(StepKind(2))] == ["int8", "bf16"]
    x = buffers.get(linear.input_formats(StepKind(2))[1], 128)
    x.values.copy_(torch.randn(x.values.shape, generator=torch.Generator().manual_seed(2)))
    partials = torch.full((linear.splits(StepKind(2)), 2, 32), float("nan"))
    linear.launch(StepKind(2), buffers.get, partials)
    assert matmuls.launched == [(8, 0, 2)]
    expected = x.values[:2].float() @ weights.float().T
    assert torch.equal(partials.sum(dim=0)[:, 8:], expected)
    assert (partials[:, :, :8] == 1).all()


def test_padded_sizes_cover_everything() -> None:
    for most in (1, 6, 64, 300):
        counts = row_counts(most)
        assert counts == sorted(set(counts))
        assert {padded_rows(n, most) for n in range(1, most + 1)} <= set(counts)
        assert all(padded_rows(n, most) >= n for n in range(most + 1))
    for most in (16, 48, 512, 2048, 2064):
        assert {padded_tokens(n, most) for n in range(1, most + 1)} <= set(token_counts(most))
        assert all(padded_tokens(n, most) >= n for n in range(1, most + 1))


def test_arrays_of_a_step() -> None:
    """Two decodes, one dead row and a chunk: what padding holds, tables with their stride, tiles by context."""
    arrays = StepArrays(StepSizes(64, 4, 8, 8, 2, 40, 8), interpreter_device())
    ids = np.array([FROM_PREVIOUS_STEP, 8, *range(20)], np.int32)
    rows = (
        scheduled_row(3, ids[:1], 70, True), scheduled_row(0, (), 9), scheduled_row(2, ids[1:2], 5, True),
        scheduled_row(1, ids[2:], 100, True),
    )  # fmt: skip
    slots = tuple(np.arange(22, dtype=np.int32) + 100 * group for group in range(2))
    tables = tuple(np.arange(20, dtype=np.int32).reshape(4, 5) + 50 * group for group in range(2))
    step = step_input(rows, slots, tables)
    tiles = tiles_of(step, 8)
    assert tiles == [(3, 16), (3, 8), (3, 0)]
    arrays.clear()
    arrays.send(step, StepKind(32, 4, len(tiles)), [0, 1, 21], [3, 2, 1])
    assert arrays["ids"][:32].tolist() == [*ids.tolist(), *[0] * 10]
    assert arrays["token_rows"][:3].tolist() == [3, 0, 0]
    assert arrays.slots(1)[:32].tolist() == [*slots[1].tolist(), *[-1] * 10]
    assert arrays["decodes"].reshape(4, 4).tolist() == [[0, 0, 71, 70], [2, 1, 6, 5], [-1] * 4, [-1] * 4]
    assert arrays["contexts"].tolist() == [71, 9, 6, 120]
    assert arrays["selected"][:3].tolist() == [0, 1, 21]
    assert arrays["selected_rows"].tolist() == [3, 2, 1, *[-1] * 5]
    stride = int(arrays["header"][0])
    assert stride >= 5
    assert arrays["tables"][(4 + 3) * stride : (4 + 3) * stride + 5].tolist() == tables[1][3].tolist()


def test_arrays_of_rows_that_decode_on() -> None:
    """Whatever steps were before, each has the arrays that it has alone: rows, kinds and selections come and go."""
    sizes, rng = StepSizes(64, 8, 8, 8, 2, 40, 8), np.random.default_rng(4)
    kept = StepArrays(sizes, interpreter_device())
    runs = [np.array(numbers) for numbers in ([3, 0, 5], [3, 0, 5], [2, 6, 4], [7, 6, 5, 4, 3, 2, 1, 0])]
    positions = np.zeros(8, np.int32)
    for number in range(60):
        numbers = runs[int(rng.integers(len(runs)))] if number % 9 else runs[0]
        positions[numbers] += 1
        count = len(numbers)
        slots = tuple(rng.integers(0, 99, count).astype(np.int32) for _ in range(2))
        tables = tuple(rng.integers(0, 9, (count, 3)).astype(np.int32) for _ in range(2))
        if number % 7 == 6:
            rows = [scheduled_row(int(row), range(3), int(positions[row]), True) for row in numbers]
            step = step_input(rows, tuple(np.repeat(each, 3) for each in slots), tables)
            kind, selected = StepKind(32, 0, 8), np.arange(2, 3 * count, 3)
        else:
            ids = np.where(rng.random(count) < 0.7, FROM_PREVIOUS_STEP, 9).astype(np.int32)
            columns = StepRows.of_decodes(numbers, numbers, positions[numbers], ids)
            step = ForwardInput(columns, positions[numbers], slots, tables)
            kind = StepKind(8 if number % 5 == 4 else padded_rows(count, 8), padded_rows(count, 8))
            selected = columns.starts[:-1] if number % 11 else np.zeros(0, np.int32)
        fresh = StepArrays(sizes, interpreter_device())
        for arrays in (kept, fresh):
            arrays.clear()
            arrays.send(step, kind, selected, numbers[: len(selected)])
        ends = {"ids": kind.tokens, "token_rows": kind.tokens, "positions": kind.tokens, "decodes": 4 * kind.decodes}
        for name in ("header", "ids", "token_rows", "positions", "starts", "counts", "contexts", "decodes", "tile_rows",
                     "tile_firsts", "selected", "selected_rows"):  # fmt: skip
            end = ends.get(name, kind.tiles if name.startswith("tile") else 8 if name.startswith("selected") else count)
            assert kept[name][:end].tolist() == fresh[name][:end].tolist(), (number, name)
        for group in range(2):
            assert kept.slots(group)[: kind.tokens].tolist() == fresh.slots(group)[: kind.tokens].tolist()
        width = int(fresh["header"][0])
        for group in range(2):
            places = [8 * width * group + width * row + block for row in range(count) for block in range(3)]
            assert kept["tables"][places].tolist() == fresh["tables"][places].tolist()


def test_a_size_whose_capture_fails_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the sizes; the others have their graphs. `test_capture_gpu` has captures that really fail."""

    class Arrays:
        def clear(self) -> None: ...

    class Space:
        arrays = Arrays()

    class Device:
        is_gpu, torch_device = True, CPU

    runner = GraphRunner([], [], Space(), Device())  # type: ignore[arg-type]
    decodes = [StepKind(rows, rows, 0) for rows in (1, 2, 4)]
    chunks = [StepKind(16, 0, 8), StepKind(32, 8, 9), StepKind(64, 8, 10)]
    captured: list[StepKind] = []
    replayed: list[StepKind] = []

    def capture(run: Any) -> Any:
        kind: StepKind = run.args[0]
        captured.append(kind)
        if kind in (decodes[1], chunks[1]):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors")
        return type("Graph", (), {"replay": lambda _self: replayed.append(kind)})()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr("realizar.backends.cuda.graphs.GraphRecorder", lambda *_: SimpleNamespace(record=capture))
    epilogue_square_sums: list[float] = []
    runner.prepare(chunks + decodes, epilogue_square_sums.append)
    assert captured == decodes[::-1] + chunks[::-1]
    assert [runner.replay(kind) for kind in decodes + chunks] == [True, False, True] * 2
    assert not runner.replay(StepKind(8, 8, 0))
    assert replayed == [decodes[0], decodes[2], chunks[0], chunks[2]]
    assert len(epilogue_square_sums) == 6
    assert epilogue_square_sums[-1] == 1.0
    why = "a graph can't be captured: CUDA error: operation not permitted when stream is capturing"
    assert [record.message for record in caplog.records] == [
        f"steps of 2 decodes; steps of 32 tokens in chunks and 8 decodes run without a graph: {why}"
    ]


def test_a_device_node_lists_a_gpu(tmp_path: Path) -> None:
    assert not gpu_listed(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert gpu_listed(tmp_path)
