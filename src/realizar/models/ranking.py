"""The head of a reranker: how relevant a document is to a query, from the last token's final hidden state. numpy only.

A GGUF file has it as `cls.output`, with the pooling `rank`; a folder of a class `...ForSequenceClassification` as
`score`, with one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError
from realizar.models.tensor_names import EMBEDDING
from realizar.quantization.tensors import tensor_source

_GGUF_POOLING = 4
_GGUF_NAMES = ("cls.output.weight", "cls.output.bias")
_FOLDER_NAMES = ("score.weight",)
_FOLDER_CLASS = "ForSequenceClassification"
_POSITIVE = "yes"


@dataclass(frozen=True, slots=True, eq=False)
class RankingHead:
    """Scores the last token's hidden state: weight float32 [labels, hidden_size], bias float32 [labels].

    `relevant` is the label that means a relevant document.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    relevant: int

    def score(self, hidden_state: Sequence[float]) -> float:
        """The probability of the relevant label among all, or the sigmoid of the only one, computed in float64.

        `hidden_state` is the last token's, [hidden_size], after the final norm.
        """
        logits = self.weight.astype(np.float64) @ np.asarray(hidden_state, np.float64) + self.bias
        others = np.delete(logits, self.relevant) if logits.size > 1 else np.zeros(1)
        distances = np.minimum(others - logits[self.relevant], 700.0)  # exp overflows above
        return float(1 / (1 + np.exp(distances).sum()))


def ranking_tensors(checkpoint: Checkpoint) -> frozenset[str]:
    """The names of the head's tensors; empty unless the model is a reranker."""
    names = _GGUF_NAMES if checkpoint.format == "gguf" else _FOLDER_NAMES
    found = frozenset(name for name in names if name in checkpoint.tensors)
    if names[0] not in found:
        return frozenset()
    if checkpoint.format == "gguf":
        pooling = checkpoint.metadata.get(f"{checkpoint.architecture}.pooling_type")
        return found if pooling == _GGUF_POOLING else frozenset()
    rows = checkpoint.tensors[names[0]].shape[0]
    return found if is_classifier(checkpoint) and rows == 1 else frozenset()


def is_classifier(checkpoint: Checkpoint) -> bool:
    """True for a folder of a class that has labels in place of next tokens, and so no head of its own for these."""
    config = checkpoint.metadata.get("config")
    classes = config.get("architectures") if isinstance(config, dict) else None
    return isinstance(classes, list) and any(str(name).endswith(_FOLDER_CLASS) for name in classes)


def ranking_head(checkpoint: Checkpoint) -> RankingHead | None:
    """None unless the model is a reranker; CheckpointError where the shape does not fit or a number is not finite."""
    names = ranking_tensors(checkpoint)
    if not names:
        return None
    weight_name = next(name for name in names if name.endswith("weight"))
    size = checkpoint.tensors[EMBEDDING if EMBEDDING in checkpoint.tensors else "token_embd.weight"].shape[-1]
    weight = _read(checkpoint, weight_name)
    if weight.size % size or not weight.size:
        shape = checkpoint.tensors[weight_name].shape
        raise CheckpointError(checkpoint.path, f"tensor '{weight_name}'", f"shape {shape} in place of (labels, {size})")
    weight = weight.reshape(-1, size)
    bias = np.zeros(len(weight), np.float32)
    for name in names - {weight_name}:
        bias = _read(checkpoint, name).reshape(-1)
    if bias.shape != (len(weight),):
        raise CheckpointError(
            checkpoint.path, "tensor 'cls.output.bias'", f"{bias.size} numbers for {len(weight)} labels"
        )
    return RankingHead(weight, bias, _relevant(checkpoint, len(weight)))


def _read(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    source = tensor_source(checkpoint, name)
    source.check_finite(0, source.out_features)
    return source.dequantize()


def _relevant(checkpoint: Checkpoint, count: int) -> int:
    labels = checkpoint.metadata.get(f"{checkpoint.architecture}.classifier.output_labels")
    listed = list(labels)[:count] if isinstance(labels, list | tuple) else []
    return listed.index(_POSITIVE) if _POSITIVE in listed else 0
