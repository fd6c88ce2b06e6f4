"""Weights that are NaN or infinite are refused at load, by the tensor's name, on every road to a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.weights.fake_card import FakeCard, FakePacker  # noqa: E402
from backends.spoiled_models import spoiled_model, vector_names  # noqa: E402
from random_models import Recipe  # noqa: E402
from realizar.backends.cuda.device import interpreter_device  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.cuda.weights import load as weights_module  # noqa: E402
from realizar.backends.cuda.weights.load import Weights  # noqa: E402
from realizar.backends.program import build_program  # noqa: E402
from realizar.checkpoint.ggml_types import GGMLType  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import CheckpointError  # noqa: E402
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES  # noqa: E402
from resolving import resolved  # noqa: E402

CPU = torch.device("cpu")
TYPES = [each.name for each in (*QUANTIZED_TYPES, *FLOAT_TYPES) if each is not GGMLType.NVFP4]
PARTS = ("biases", "layer_norm", "qk_norm", "sinks", "post_norms")
VECTORS = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, parts=PARTS, windows=(None,))


@pytest.mark.parametrize("road", ["raw", "planes"])
@pytest.mark.parametrize("kind", TYPES)
def test_matrices_of_every_type(kind: str, road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first matrix that is packed, so that hardly anything is packed before it is refused; and the embedding."""
    monkeypatch.setattr(weights_module, "Packer", FakePacker)
    device = interpreter_device() if road == "planes" else FakeCard(CPU, "fake", (9, 0), 1, 1, 1 << 30)
    recipe = Recipe(weights=kind, windows=(None,))
    for value, name in (("nan", "layers.0.q.weight"), ("inf", "layers.0.v.weight")):
        spec, checkpoint = spoiled_model(recipe, name, value)
        groups = build_program(spec).block_matmuls()
        with pytest.raises(CheckpointError, match=rf"^random\.gguf: tensor '{name}': .* is not finite"):
            Weights(spec, build_program(spec), checkpoint, device).load(groups, lambda _: None)


@pytest.mark.parametrize(("name", "kind"), [("embedding", "Q4_0"), ("layer_table", "F32"), ("layer_table", "Q8_0")])
def test_what_is_read_row_by_row(name: str, kind: str) -> None:
    spec, checkpoint = spoiled_model(Recipe(windows=(None,), weights=kind, input_size=32), name, "nan")
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': .* is not finite"):
        Weights(spec, build_program(spec), checkpoint, interpreter_device()).load([], lambda _: None)


@pytest.mark.parametrize("name", vector_names(VECTORS))
def test_norms_biases_and_sinks(name: str) -> None:
    """A whole load finds them, though some are read when a step first needs them."""
    spec, checkpoint = spoiled_model(VECTORS, name, "nan")
    backend = CUDABackend(device=interpreter_device())
    config = EngineConfig(max_running=2, max_step_tokens=16, context_length=64, kv_cache_dtype="f16")
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': number \d+ is not finite"):
        backend.load(spec, checkpoint, resolved(spec, checkpoint, config, "cuda"))
    backend.shutdown()
