"""The head of a reranker, from both forms of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import HIDDEN, config_checkpoint, gguf_checkpoint, stored
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError
from realizar.models.check_tensors import check_tensors
from realizar.models.ranking import RankingHead, ranking_head
from realizar.models.registry import build_spec

NUMBERS = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32)
RANK = {"llama.pooling_type": 4}
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}


def gguf(keys: dict[str, Any], rows: int, bias: int = 0) -> Checkpoint:
    checkpoint = gguf_checkpoint(keys)
    tensors = {"cls.output.weight": NUMBERS[:rows], **({"cls.output.bias": NUMBERS[0, :bias]} if bias else {})}
    checkpoint.tensors.update({name: stored(name, each.shape, each) for name, each in tensors.items()})
    return checkpoint


def folder(config: dict[str, Any], rows: int) -> Checkpoint:
    checkpoint = config_checkpoint(config, lm_head=None)
    checkpoint.tensors["score.weight"] = stored("score.weight", (rows, HIDDEN), NUMBERS[:rows])
    return checkpoint


@pytest.mark.parametrize(
    ("labels", "relevant"), [(None, 0), (["yes", "no"], 0), (["no", "yes"], 1), (["a", "b"], 0), (["no"], 0), (7, 0)]
)
def test_gguf(labels: Any, relevant: int) -> None:
    checkpoint = gguf({**RANK, "llama.classifier.output_labels": labels}, 2, bias=2)
    check_tensors(build_spec(checkpoint), checkpoint)
    head = ranking_head(checkpoint)
    assert head is not None
    assert head.relevant == relevant
    assert np.array_equal(head.weight, NUMBERS[:2])
    assert np.array_equal(head.bias, NUMBERS[0, :2])


def test_folder() -> None:
    checkpoint = folder(CLASSIFIER, 1)
    check_tensors(build_spec(checkpoint), checkpoint)
    head = ranking_head(checkpoint)
    assert head is not None
    assert np.array_equal(head.weight, NUMBERS[:1])


@pytest.mark.parametrize(
    "checkpoint",
    [gguf({}, 1), gguf({"llama.pooling_type": 3}, 1), folder({}, 1), folder(CLASSIFIER, 2)],
    ids=["no pooling", "other pooling", "other class", "two labels"],
)
def test_others_are_no_rerankers(checkpoint: Checkpoint) -> None:
    """Their tensors are then unexpected, or the head of next tokens is missing."""
    assert ranking_head(checkpoint) is None
    with pytest.raises(CheckpointError, match=r"unexpected|missing"):
        check_tensors(build_spec(checkpoint), checkpoint)


def test_a_model_without_a_head_is_none() -> None:
    assert ranking_head(gguf_checkpoint(RANK)) is None


def bent(name: str, values: Any) -> Checkpoint:
    checkpoint = gguf(RANK, 2, bias=2)
    checkpoint.tensors[name] = stored(name, np.shape(values), values)
    return checkpoint


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cls.output.weight", np.zeros((2, HIDDEN - 1))),
        ("cls.output.weight", np.full((2, HIDDEN), np.nan)),
        ("cls.output.bias", np.zeros(3)),
        ("cls.output.bias", np.full(2, np.inf)),
    ],
)
def test_bad_heads_are_refused(name: str, values: Any) -> None:
    with pytest.raises(CheckpointError, match=name):
        ranking_head(bent(name, values))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_scores(scale: float) -> None:
    hidden = np.random.default_rng(1).standard_normal(HIDDEN) * scale
    three = RankingHead(NUMBERS, np.array([1, 2, 3], np.float32), 2)
    logits = NUMBERS.astype(np.float64) @ hidden + [1, 2, 3]
    weights = np.exp(logits - logits.max())
    assert three.score(hidden.tolist()) == pytest.approx(weights[2] / weights.sum(), abs=1e-12)
    one = RankingHead(NUMBERS[:1], np.zeros(1, np.float32), 0)
    assert one.score(hidden.tolist()) == pytest.approx(0.5 * (1 + np.tanh(NUMBERS[0].astype(np.float64) @ hidden / 2)))


def test_transformers_gives_the_same_score(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from cpu_runs import load_runner
    from realizar.checkpoint.open import open_checkpoint
    from realizar.config import EngineConfig

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_labels=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    ids = [5, 9, 33, 60, 2, 7]
    with torch.no_grad():
        expected = torch.sigmoid(model(torch.tensor([ids])).logits[0, 0].double()).item()
    runner = load_runner(tmp_path, EngineConfig(threads=1, kv_cache_bytes=16 << 20, max_running=1))
    head = ranking_head(open_checkpoint(tmp_path))
    assert head is not None
    assert head.score(runner.pooled(ids, "last")) == pytest.approx(expected, abs=1e-5)
