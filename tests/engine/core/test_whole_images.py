"""Tokens of an image see each other, as in transformers' Gemma 3, with the same bits in any steps."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.attention_record import STEP_ROWS
from realizar.backends.cpu.operations import BoundProgram
from realizar.backends.cpu.runner import CPUBackend
from realizar.batch import ScheduledBatch
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.errors import CapacityError, InvalidRequestError
from realizar.models.registry import build_spec
from realizar.request import PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams
from resolving import new_core, resolved
from step_inputs import TokenOutput, stepped

torch = pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
transformers = pytest.importorskip("transformers", reason="parity is against transformers")

IMAGES = ((5, 45), (60, 61), (70, 105))
"""First token and end of each in a prompt of LENGTH tokens; they cross blocks of the cache, and one tile's edge."""
LENGTH, WIDTH, COUNT = 120, 64, 6


class Seeing(NamedTuple):
    path: Path
    request: Request
    wanted: NDArray[np.float32]
    causal: NDArray[np.float32]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A model with windows shorter than images, a prompt that scores itself, and transformers' log-probabilities of
    each token after those before it, with images seen whole and without.
    """
    text = {
        "vocab_size": 300, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299
    )
    model: Any = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * (0.15 if values.dim() > 1 else 0.3))
    path = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(path)
    rng = np.random.default_rng(3)
    ids = rng.integers(2, 290, LENGTH)
    rows = [rng.standard_normal((end - start, WIDTH)).astype(np.float32) for start, end in IMAGES]
    embeds, kinds = model.get_input_embeddings()(torch.tensor(ids[None])).detach(), torch.zeros(1, LENGTH).long()
    for (start, end), values in zip(IMAGES, rows, strict=True):
        embeds[0, start:end], kinds[0, start:end] = torch.tensor(values), 1
    scored = []
    for own in (kinds, None):
        with torch.no_grad():
            logits = model(inputs_embeds=embeds, token_type_ids=own).logits[0]
        chosen = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:, None]))
        scored.append(chosen[:, 0].numpy())
    given = tuple(seen_whole(values, start) for (start, _), values in zip(IMAGES, rows, strict=True))
    sampling = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0, seed=0)
    return Seeing(path, Request("r", tuple(ids.tolist()), sampling, COUNT, embeddings=given), *scored)


def seen_whole(values: NDArray[np.float32], start: int) -> PromptEmbeddings:
    """A run as that of a picture: its digests are of all of it, and of each place."""
    run, whole = prompt_embeddings(values, start), values.tobytes()
    digests = b"".join(sha256(whole + bytes([place])).digest() for place in range(run.num_tokens))
    return replace(run, digests=digests, is_seen_whole=True)


def make_core(path: Path, *, contexts: int = 8, step_tokens: int = 48, **options: Any) -> EngineCore:
    checkpoint = open_checkpoint(path)
    spec = build_spec(checkpoint)
    sizes = sum(each.num_kv_heads * each.head_size for _, each in spec.attentions())
    config = EngineConfig(
        threads=1, context_length=160, max_running=4, max_step_tokens=step_tokens,
        kv_cache_bytes=contexts * 160 * 2 * 4 * sizes,
    )  # fmt: skip
    backend = CPUBackend()
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
    return new_core(backend, spec, config, **options)


def run(core: EngineCore, *requests: Request) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in stepped(core):
            outputs.setdefault(output.request_id, []).append(output)
        core.audit()
    return outputs


def text_of(outputs: list[TokenOutput]) -> tuple[Any, ...]:
    """What a request got: tokens, and log-probabilities of them."""
    assert outputs[-1].error is None, outputs[-1].error
    return [i for each in outputs for i in each.token_ids], [i for each in outputs for i in each.logprobs]


def scores(outputs: list[TokenOutput]) -> NDArray[np.float32]:
    return np.array([entry.logprob for each in outputs for entry in each.prompt_logprobs], np.float32)


def test_images_are_seen_whole_as_in_transformers(seeing: Seeing) -> None:
    core = make_core(seeing.path)
    found = scores(run(core, seeing.request)["r"])
    np.testing.assert_allclose(found, seeing.wanted, atol=1e-4)
    parts = tuple(replace(run, is_seen_whole=False) for run in seeing.request.embeddings)
    plain = scores(run(make_core(seeing.path), replace(seeing.request, embeddings=parts))["r"])
    np.testing.assert_allclose(plain, seeing.causal, atol=1e-4)
    assert np.abs(seeing.wanted - seeing.causal).max() > 0.01
    core.close()


@pytest.mark.parametrize(("step_tokens", "contexts"), [(512, 8), (48, 8), (40, 8), (48, 4)])
def test_any_chunks_batches_and_prefixes_give_the_same_bits(seeing: Seeing, step_tokens: int, contexts: int) -> None:
    """Alone, beside others that read and decode, preempted where blocks are short, and from the cache."""
    sampling = replace(seeing.request.sampling, prompt_logprobs=None)
    plain = replace(seeing.request, sampling=sampling)
    expected = text_of(run(make_core(seeing.path, step_tokens=512), seeing.request)["r"])
    core = make_core(seeing.path, step_tokens=step_tokens, contexts=contexts)
    others = [replace(plain, request_id=f"o{place}", cache_salt=f"{place}") for place in range(4)]
    together = run(core, *others)
    assert all(text_of(together[each.request_id]) == expected for each in others)
    again = run(core, replace(plain, request_id="again", cache_salt="3"))["again"]
    assert text_of(again) == expected
    assert again[0].num_cached_tokens == 96 or contexts == 4
    assert bool(core.scheduler.counts.num_preemptions) == (contexts == 4)
    core.close()


def test_other_pixels_anywhere_in_an_image_leave_none_of_its_blocks(seeing: Seeing) -> None:
    """Keys of its first tokens depend on its last."""
    request = replace(seeing.request, sampling=replace(seeing.request.sampling, prompt_logprobs=None))
    first, *others = request.embeddings
    values = np.frombuffer(first.values, np.float32).reshape(-1, WIDTH).copy()
    values[-1, 0] += 1
    changed = replace(request, request_id="changed", embeddings=(seen_whole(values, first.start), *others))
    core = make_core(seeing.path)
    run(core, request)
    found = run(core, changed)["changed"]
    assert found[0].num_cached_tokens == 0
    assert text_of(found) == text_of(run(make_core(seeing.path), changed)["changed"])
    core.close()


def test_images_that_no_step_holds_are_refused(seeing: Seeing) -> None:
    core = make_core(seeing.path, step_tokens=39)
    with pytest.raises(InvalidRequestError, match=r"an image of the prompt has 40 tokens, .*; a step has at most 39"):
        core.add(seeing.request)
    core.close()


def test_a_step_that_lacks_memory_for_an_image_ends_its_request(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CPUBackend, program: BoundProgram) -> None:
        raise CapacityError("no memory today")

    core = make_core(seeing.path)
    monkeypatch.setattr(CPUBackend, "walk", fail)
    (output,) = run(core, seeing.request)["r"]
    assert output.error is not None
    assert "no memory today" in output.error.message
    core.close()


def test_a_step_of_several_that_lacks_memory_ends_none_for_its_image(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is tried alone."""
    walk, begun = CPUBackend.walk, list[int]()

    def fail_once(self: CPUBackend, program: BoundProgram) -> None:
        begun.append(int(self.model.workspace.step[STEP_ROWS]))
        if len(begun) == 1:
            raise CapacityError("no memory today")
        walk(self, program)

    core = make_core(seeing.path, step_tokens=60)
    monkeypatch.setattr(CPUBackend, "walk", fail_once)
    found = run(core, *(replace(seeing.request, request_id=f"{place}", cache_salt=f"{place}") for place in range(2)))
    assert begun[0] == 2
    assert text_of(found["0"]) == text_of(found["1"])
    core.close()


def test_steps_that_memory_bounds_hold_images_within_the_bound(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one would fail again, and end requests; an image beyond the bound is tried, alone."""
    sampling, sizes = replace(seeing.request.sampling, prompt_logprobs=None), list[list[int]]()
    plain = replace(seeing.request, sampling=sampling)
    others = [replace(plain, request_id=f"{place}", cache_salt=f"{place}") for place in range(4)]
    core = make_core(seeing.path, step_tokens=512)
    schedule, limit = core.scheduler.schedule, core.scheduler._limit

    def schedule_noted() -> ScheduledBatch:
        sizes.append((batch := schedule()).columns.num_tokens.tolist())
        return batch

    monkeypatch.setattr(core.scheduler, "schedule", schedule_noted)
    for most in (60, 36):
        monkeypatch.setattr(limit, "tokens", most)
        found = run(core, *others)
        core.clear_cache()
        assert len({repr(text_of(outputs)) for outputs in found.values()}) == 1
        assert all(sum(size) <= most or (size == [40] and most < 40) for size in sizes)
        assert [40] in sizes or most > 40
        sizes.clear()
    core.close()
