"""A model of which a GPU has some layers and the CPU the others: numpy's log-probabilities, whichever comes first."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import new_backend
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.devices import THE_CPU, ChosenDevice
from realizar.backends.resolved_config import LayerSpan, ResolvedConfig
from realizar.backends.spans.backend import GivingBackend, SpanBackend
from realizar.backends.spans.resolve import resolve_spans
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.models.spec import ModelSpec
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from resolving import resolved
from step_inputs import stepped

_GPU = ChosenDevice("cuda", capability=(9, 0))
_RECIPE = Recipe(
    head_size=32, num_heads=2, num_kv_heads=1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="F32",
    windows=(5, None, 5, None), parts=("qk_norm", "biases"), recurrent=("delta",), key_heads=1, value_heads=2,
)  # fmt: skip


def _core(layers_on: str, spec: ModelSpec, checkpoint: Checkpoint) -> EngineCore:
    config = EngineConfig(
        layers_on=layers_on, threads=1, max_running=2, max_step_tokens=16, kv_cache_bytes=1 << 20, context_length=64,
        kv_cache_dtype="f16", speculative_tokens=2,
    )  # fmt: skip

    def resolve(span: ModelSpec, own: EngineConfig, device: ChosenDevice) -> ResolvedConfig:
        return resolved(span, checkpoint, own, device.kind)

    def make(span: LayerSpan, _spec: ModelSpec, _checkpoint: Checkpoint) -> GivingBackend:
        return new_backend() if span.config.chosen.kind == "cuda" else CPUBackend()

    settled, backend = resolve_spans(spec, config, resolve), SpanBackend(make)
    backend.load(spec, checkpoint, settled)
    return EngineCore(backend, spec, settled)


@pytest.mark.parametrize("layers_on", ["cuda=2,cpu=rest", "cpu=2,cuda=rest"])
def test_log_probabilities_are_numpys(layers_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, beside answers; drafts that are verified, and states that go on behind them."""
    monkeypatch.setattr(
        "realizar.backends.spans.resolve.choose_device", lambda name: THE_CPU if name == "cpu" else _GPU
    )
    spec, checkpoint = random_model(_RECIPE)
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint))
    sampling = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    prompts = [(*random_tokens(_RECIPE, 20, seed), *random_tokens(_RECIPE, 4, seed)) for seed in (1, 2)]
    core = _core(layers_on, spec, checkpoint)
    found: dict[str, list[tuple[int, float]]] = {str(index): [] for index in range(2)}
    try:
        for index, prompt in enumerate(prompts):
            core.add(Request(str(index), prompt, sampling, 12))
        while core.has_work:
            for output in stepped(core):
                entries = (*output.prompt_logprobs, *output.logprobs)
                found[output.request_id] += [(entry.token_id, entry.logprob) for entry in entries]
            core.audit()
        assert core.scheduler.counts.num_drafts > 0
    finally:
        core.close()
    for index, prompt in enumerate(prompts):
        entries = found[str(index)]
        text = (prompt[0], *(token_id for token_id, _ in entries))
        assert text[: len(prompt)] == prompt
        assert len(text) == len(prompt) + 12
        logits = reference.logits(text[:-1])
        exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        np.testing.assert_allclose([value for _, value in entries], exact[np.arange(len(entries)), text[1:]], atol=0.01)
