"""Models of safetensors whose matrices are codes and scales, on a card: as they lie in tensors of several methods."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from quantization.stored_checkpoints import VOCABULARY, Stored, write_model  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.models.registry import build_spec  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    ("batch_invariant", "kind"),
    [(False, "dense"), (False, "mixture"), (True, "mixture"), (False, "shared"), (True, "shared")],
)
@pytest.mark.parametrize(
    "stored",
    [
        Stored("awq"), Stored("packed", symmetric=True), Stored("fp8", scale="float32"),
        Stored("float", group=0, rows=1), Stored("nvfp4"), Stored("gptq", bits=8),
        Stored("gptq", group=32, ordered=True),
    ],
    ids=str,
)  # fmt: skip
def test_logits(stored: Stored, batch_invariant: bool, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, stored, mixture=kind == "mixture", shared=kind == "shared")
    checkpoint = open_checkpoint(tmp_path)
    spec = build_spec(checkpoint)
    config = EngineConfig(
        device="cuda", max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    ids = np.random.default_rng(2).integers(0, VOCABULARY, 19).astype(np.int32).tolist()
    runner = GPURunner(spec, checkpoint, config)
    found = runner.logits(ids, (16, 2))
    expected = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
    assert (np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max() <= 0.03
    runner.close()
