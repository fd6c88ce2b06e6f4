"""Weights of a layer lie in one allocation: parts apart and aligned, values as without it, nothing counted twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.weights.fake_card import FakeCard, FakePacker  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.weights import load as weights_module  # noqa: E402
from realizar.backends.cuda.weights.load import Matrix, Weights  # noqa: E402
from realizar.backends.cuda.weights.pack import PackedMatrix  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import memory_bytes, pack_by_threads  # noqa: E402
from realizar.backends.cuda.weights.plain import PlainMatrix  # noqa: E402
from realizar.backends.cuda.weights.store import ALIGNMENT, Store  # noqa: E402
from realizar.backends.program import build_program  # noqa: E402
from realizar.backends.weight_tensors import WeightTensors  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import UnsupportedModelError  # noqa: E402
from realizar.models.parts import Linear  # noqa: E402
from realizar.models.spec import Layer, ModelSpec  # noqa: E402
from realizar.quantization.source import MatrixSource  # noqa: E402

CPU = torch.device("cpu")
RECIPES = {
    "quantised": Recipe(weights="Q4_K", parts=("biases", "qk_norm", "sinks")),
    "codebook": Recipe(weights="IQ4_NL", parts=("biases", "post_norms", "layer_norm")),
    "floats": Recipe(weights="BF16", parts=("biases", "ungated"), activation="gelu"),
}


def groups_of(spec: ModelSpec) -> list[tuple[Linear, ...]]:
    return build_program(spec).matmuls()


def tensors_of(matrix: Matrix) -> list[torch.Tensor]:
    if isinstance(matrix, PackedMatrix):
        return [matrix.weights, matrix.block_scales]
    return list(matrix.arrays.values()) if isinstance(matrix, PlainMatrix) else [matrix]


def layer_tensors(weights: Weights, spec: ModelSpec, layer: Layer) -> list[torch.Tensor]:
    """Matrices, vectors as steps ask for them, and biases of a layer."""
    names = {linear.weight for linear in layer.linears()}
    groups = [group for group in groups_of(spec) if group[0].weight in names]
    matrices = [matrix for group in groups for matrix in weights.groups[tuple(one.weight for one in group)]]
    biases = [bias for group in groups if (bias := weights.bias(tuple(group))) is not None]
    vectors = [weights.vector(name) for name in layer.vectors()]
    return [tensor for matrix in matrices for tensor in tensors_of(matrix)] + biases + vectors


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def loaded(spec: ModelSpec, checkpoint: object, progress: Callable[[int], None] = lambda _size: None) -> Weights:
    weights = Weights(spec, build_program(spec), checkpoint, FakeCard(CPU, "fake", (9, 0), 1, 1, 1 << 30))  # type: ignore[arg-type]
    weights.load(groups_of(spec), progress)
    return weights


@pytest.fixture(autouse=True)
def packs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weights_module, "Packer", FakePacker)
    return


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_is_one_allocation(name: str) -> None:
    spec, checkpoint = random_model(RECIPES[name])
    sizes: list[int] = []
    weights = loaded(spec, checkpoint, sizes.append)
    names = {linear.weight for group in groups_of(spec) for linear in group}
    stored = WeightTensors(spec, checkpoint)
    assert sum(sizes) == sum(stored.matrix(name).size_bytes for name in names)
    seen = set()
    for layer in spec.layers:
        tensors = layer_tensors(weights, spec, layer)
        (base,) = {storage(tensor) for tensor in tensors}
        seen.add(base)
        places = sorted((tensor.data_ptr() - base, tensor.numel() * tensor.element_size()) for tensor in tensors)
        assert all(first % ALIGNMENT == 0 for first, _ in places)
        assert all(first + size <= later for (first, size), (later, _) in itertools.pairwise(places))
        whole = tensors[0].untyped_storage().nbytes()
        assert places[-1][0] + places[-1][1] <= whole <= sum(size for _, size in places) + 2 * ALIGNMENT * len(places)
    assert len(seen) == len(spec.layers)
    (head,) = weights.groups[(spec.head.weight,)]
    assert len({storage(tensor) for tensor in tensors_of(head)} - seen) == 1
    if isinstance(weights.embedding, PlainMatrix):
        assert len({storage(tensor) for tensor in tensors_of(weights.embedding)} - seen) == 1


@pytest.mark.parametrize("name", ["quantised", "codebook"])
def test_matrices_are_as_packed_alone(name: str) -> None:
    spec, checkpoint = random_model(RECIPES[name])
    weights, tensors = loaded(spec, checkpoint), WeightTensors(spec, checkpoint)
    tables = set()
    for group in groups_of(spec):
        sources = [tensors.matrix(one.weight) for one in group]
        (found,) = weights.groups[tuple(one.weight for one in group)]
        assert isinstance(found, PackedMatrix)
        alone = pack_by_threads(sources, CPU)
        assert torch.equal(found.weights, alone.weights)
        assert torch.equal(found.block_scales, alone.block_scales)
        assert (found.table is None) == (alone.table is None)
        if found.table is not None and alone.table is not None:
            assert torch.equal(found.table, alone.table)
            tables.add(storage(found.table))
        assert memory_bytes(sources) >= alone.weights.numel() + 4 * alone.block_scales.numel()
    assert len(tables) <= 1


def test_floats_are_as_stored() -> None:
    spec, checkpoint = random_model(RECIPES["floats"])
    weights, tensors = loaded(spec, checkpoint), WeightTensors(spec, checkpoint)
    for group in groups_of(spec):
        for linear, matrix in zip(group, weights.groups[tuple(one.weight for one in group)], strict=True):
            assert isinstance(matrix, torch.Tensor)
            assert matrix.shape == (linear.out_features, linear.in_features)
            stored = tensors.matrix(linear.weight).raw
            assert np.array_equal(matrix.contiguous().view(torch.uint8).numpy(), stored)
    for layer in spec.layers:
        for name in layer.vectors():
            assert np.array_equal(weights.vector(name).numpy(), weights.vector_values(name))
            assert np.array_equal(weights.vector(name, 1.0).numpy(), weights.vector_values(name) + np.float32(1))


def test_what_was_not_planned_has_memory_of_its_own() -> None:
    store = Store([100, 1], CPU)
    first, second, third = store.take(100), store.take(257), store.take(1)
    assert storage(first) == storage(third) != storage(second)
    assert (third.data_ptr() - first.data_ptr(), second.numel()) == (ALIGNMENT, 257)


def test_a_layout_without_a_format_is_refused_before_anything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_parts: Sequence[MatrixSource]) -> int:
        raise UnsupportedModelError("no format")

    monkeypatch.setattr(weights_module, "memory_bytes", refuse)
    spec, checkpoint = random_model(RECIPES["quantised"])
    with pytest.raises(UnsupportedModelError, match=r"q\.weight.*no format"):
        loaded(spec, checkpoint)


@pytest.mark.gpu
def test_allocations_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole backend: one allocation a layer, one for the head, one for the embedding."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.undo()
    spec, checkpoint = random_model(RECIPES["quantised"])
    runner = GPURunner(spec, checkpoint, EngineConfig(max_running=2, max_step_tokens=64, kv_cache_bytes=16 << 20))
    weights = runner.backend.model.weights
    for layer in spec.layers:
        tensors = [weights.vector(name) for name in layer.vectors()]
        names = {linear.weight for linear in layer.linears()}
        for key, matrices in weights.groups.items():
            if key[0] in names:
                tensors += [tensor for matrix in matrices for tensor in tensors_of(matrix)]
        assert len({storage(tensor) for tensor in tensors}) == 1
        assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    (head,) = weights.groups[(spec.head.weight,)]
    assert len({storage(tensor) for tensor in tensors_of(head)}) == 1
    runner.close()
