"""Small models on the CPU, and in exact arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.verdict.small_steps import CONFIG, STEPS, Seen, row_tokens, run_small_steps
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.spec import ModelSpec
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from resolving import resolved


def run_on_cpu(spec: ModelSpec, checkpoint: Checkpoint) -> Seen:
    backend = CPUBackend()
    try:
        backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG))
        return run_small_steps(backend, spec.vocab_size)
    finally:
        backend.shutdown()


def exact_logprobs(spec: ModelSpec, checkpoint: Checkpoint) -> NDArray[np.float64]:
    """float64 [tokens, vocab], in the order of the steps, each row read at once."""
    model = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    tokens = row_tokens(spec.vocab_size)
    counts = np.zeros(len(tokens), int)
    for row, count in (part for parts in STEPS for part in parts):
        counts[row] += count
    logits = [model.logits(ids[:count].tolist()) for ids, count in zip(tokens, counts, strict=True)]
    done = np.zeros(len(tokens), int)
    lines = []
    for row, count in (part for parts in STEPS for part in parts):
        lines.append(logits[row][done[row] : done[row] + count])
        done[row] += count
    values = np.concatenate(lines)
    shifted = values - values.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found
