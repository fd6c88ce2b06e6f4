"""Every architecture, from safetensors and from GGUF, through the CPU backend, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from architecture_case import Form
from architectures import build_case, check_logits, expected_logits, rows_by_turns
from cpu_runs import Runner, load_runner
from dense_architectures import DENSE
from models.mxfp4_checkpoints import with_mxfp4_experts
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from reference_model import ReferenceModel
from reference_tensors import load_tensor

torch = pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")


@pytest.mark.parametrize(("name", "form"), rows_by_turns(0))
def test_cpu_logits_agree_with_transformers(name: str, form: Form, tmp_path: Path) -> None:
    """Chunks of 5, 1 and 7 tokens, then token by token, past windows and rope switches."""
    built = build_case(name, tmp_path, form)
    config = EngineConfig(threads=1, block_size=32, max_step_tokens=64, max_running=8)
    runner = load_runner(built.path, config, built.context_length)
    assert runner.capacity.kv_cache_dtype == "f32"
    check_logits(built, lambda ids: runner.logits(ids, (5, 1, 7)))
    runner.close()


@pytest.mark.parametrize("name", [name for name, case in DENSE.items() if case.num_tokens == 600])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    """150 tokens, past every window and rope switch, in other chunks beside another row."""
    built = build_case(name, tmp_path, "gguf")
    config = EngineConfig(threads=2, block_size=32, max_step_tokens=64, max_running=2)
    runner = load_runner(built.path, config, built.context_length)
    tokens = built.token_ids[:150]
    alone = runner.logits(tokens, (60, 40))
    one, other = runner.request(0, tokens), runner.request(1, tokens[::-1], first=5)
    for counts in ((40, 20), (1, 60), (60, 1), (30, 30), (1, 1), (18, 38)):
        runner.step([(one, counts[0]), (other, counts[1])])
    np.testing.assert_array_equal(one.values(), alone)
    runner.close()


def test_experts_saved_as_one_tensor(tmp_path: Path) -> None:
    """Gate and up of all experts are one tensor, of which the backend packs the out_features of each."""
    built = build_case("qwen3moe", tmp_path, "safetensors")
    fused = built._replace(path=tmp_path / "fused")
    built.model.save_pretrained(fused.path, save_original_format=False)
    config = EngineConfig(threads=1, block_size=32, max_step_tokens=64, max_running=2, device="cpu")
    runner = load_runner(fused.path, config, built.context_length)
    check_logits(fused, runner.logits)
    runner.close()


def test_experts_of_mxfp4_in_safetensors(tmp_path: Path) -> None:
    """Codes and scales in tensors of their own, as gpt-oss is published."""
    built = build_case("gpt-oss", tmp_path, "safetensors")
    config = EngineConfig(threads=1, block_size=32, max_step_tokens=64, max_running=8, device="cpu")
    checkpoint, values = with_mxfp4_experts(open_checkpoint(built.path), np.random.default_rng(9))
    spec = build_spec(checkpoint)
    runner = Runner(spec, checkpoint, config)
    found = runner.logits(built.token_ids[:60])
    runner.close()
    plain = {name: load_tensor(source, checkpoint) for name, source in spec.tensors.items()}
    reference = ReferenceModel(spec, plain).logits(built.token_ids[:60])
    errors = np.linalg.norm(found - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
    assert np.median(errors) <= 6e-2, "int8 activations; some tokens choose other experts for them"
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            if name in values:
                parameter.copy_(torch.from_numpy(values[name].copy()))
    exact = expected_logits(built)[:60]
    assert (np.linalg.norm(reference - exact, axis=-1) <= 1e-4 * np.linalg.norm(exact, axis=-1)).all()
