"""Heads that read a model's states on the CPU: their logits are the numpy twin's, whatever computed what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend_runs import LOGITS_AT_ONCE
from backends.block_reads import AssistantReads, BlockReads, Reads, ReadStep, StepReads
from backends.draft_models import assistant_head, dflash_head, eagle3_head, next_token_block, roughly
from engine.core.core_runs import run, tokens
from random_models import Recipe, random_model, random_tokens
from realizar.backends.base import ForwardInput, ModelSource
from realizar.backends.cpu.runner import CPUBackend
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import InvalidRequestError, UnsupportedModelError
from realizar.models.parts import PairedInputs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from resolving import resolved

RECIPE = Recipe(
    hidden_size=64, feed_forward_size=96, head_size=32, num_heads=2, num_kv_heads=1, vocab_size=96, windows=(None,),
    weights="F32",
)  # fmt: skip
CONFIG = EngineConfig(
    threads=1, max_running=4, max_step_tokens=64, context_length=704, kv_cache_bytes=16 << 20, speculative_tokens=3,
    prompt_lookup_min=100, prompt_lookup_max=100,
)  # fmt: skip
DEEP = replace(RECIPE, windows=(None, None, None))
HYBRID = replace(RECIPE, windows=(None, None), recurrent=("delta",), value_size=16, lacking=("feed_forward",))
HEADS = {
    "block": (RECIPE, next_token_block(RECIPE, of_state=0.5)),
    "block of a hybrid": (HYBRID, next_token_block(HYBRID, of_state=0.5)),
    "eagle3": (DEEP, eagle3_head(DEEP, None, normed=False)),
    "eagle3 with more norms": (DEEP, eagle3_head(DEEP, None)),
}


def core_with(recipe: Recipe, drafter: ModelSource, **fields: Any) -> tuple[EngineCore, CPUBackend]:
    spec, checkpoint = random_model(recipe)
    config = resolved(spec, checkpoint, replace(CONFIG, **fields))
    backend = CPUBackend()
    backend.load(spec, checkpoint, config, {"drafter": drafter})
    return EngineCore(backend, spec, config, policy=Policy(measures_drafts=False)), backend


def drafter_of(backend: CPUBackend) -> CPUBackend:
    assert backend._drafter is not None
    drafter = backend._drafter.backend
    assert isinstance(drafter, CPUBackend)
    return drafter


def reader_of(drafter: CPUBackend) -> ReadStep:
    def read(step: ForwardInput) -> StepReads:
        tokens = range(len(step.positions))
        parts = [tokens[first : first + LOGITS_AT_ONCE] for first in tokens[::LOGITS_AT_ONCE]]
        logits = np.concatenate([drafter.logits(list(part)).copy() for part in parts])
        return StepReads(step.columns.token_ids, step.positions, logits)

    return read


def reads_of(backend: CPUBackend, monkeypatch: pytest.MonkeyPatch) -> Reads:
    drafter = drafter_of(backend)
    return Reads(drafter, reader_of(drafter), monkeypatch)


def answered(core: EngineCore, prompts: dict[str, tuple[int, ...]], count: int) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        core.add(Request(name, prompt, SamplingParams(temperature=0), count))
    found = run(core)
    return {name: [*prompt, *tokens(found[name])] for name, prompt in prompts.items()}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("length", [8, 600])
def test_logits_are_those_of_the_twin_in_chunks_and_after_a_prefix(
    length: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, drafter = HEADS[name]
    prompt = tuple(random_tokens(recipe, length, 3))
    core, backend = core_with(recipe, drafter)
    for turn in ("first", "again"):  # the second one begins with the blocks of the first
        reads = reads_of(backend, monkeypatch)
        text = answered(core, {turn: prompt}, 20)[turn]
        errors = reads.errors(recipe, drafter, text, length)
        assert len(errors) >= (length if turn == "first" else 0) + 18
        assert max(errors) <= 1e-4
    counts = core.scheduler.counts
    assert (counts.prefix_cache_hits > 0) is (length == 600)
    assert (core.cache.snapshots.counts.restored > 0) is (recipe == HYBRID and length == 600)
    assert counts.draft_tokens > counts.accepted_tokens
    core.close()


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_twin_after_preemption(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, drafter = HEADS[name]
    prompts = {str(length): tuple(random_tokens(recipe, length, length)) for length in (90, 120, 40)}
    size = 90_000 * (1 + len(recipe.windows) - len(recipe.recurrent))
    core, backend = core_with(recipe, drafter, kv_cache_bytes=size, max_step_tokens=24, context_length=256)
    reads = reads_of(backend, monkeypatch)
    texts = answered(core, prompts, 60)
    assert core.scheduler.counts.num_preemptions > 0
    for request, text in texts.items():
        errors = reads.errors(recipe, drafter, text, len(prompts[request]))
        assert len(errors) >= len(text) - 2
        assert max(errors) <= 1e-4
    core.close()


def test_packed_weights_read_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are of two terms: half as many heads have them as queries."""
    recipe = replace(DEEP, weights="Q8_0")
    drafter = eagle3_head(recipe, None)
    core, backend = core_with(recipe, drafter)
    reads = reads_of(backend, monkeypatch)
    text = answered(core, {"a": tuple(random_tokens(recipe, 70, 3))}, 10)["a"]
    errors = reads.errors(recipe, drafter, text, 70)
    assert len(errors) > 70
    assert max(errors) < 0.06
    core.close()


BLOCKS = dflash_head(DEEP)


@pytest.mark.parametrize("length", [8, 600])
def test_blocks_are_those_of_the_twin_in_chunks_and_after_a_prefix(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(random_tokens(DEEP, length, 3))
    core, backend = core_with(DEEP, BLOCKS)
    reads = BlockReads(drafter_of(backend), reader_of(drafter_of(backend)), monkeypatch)
    for turn in ("first", "again"):  # the second one begins with the blocks of the first
        reads.blocks.clear()
        text = answered(core, {turn: prompt}, 20)[turn]
        errors = reads.errors(DEEP, BLOCKS, text, reads.blocks[0][0])
        assert len(errors) >= 15
        assert max(errors) <= 1e-4
    counts = core.scheduler.counts
    assert (counts.prefix_cache_hits > 0) is (length == 600)
    assert counts.draft_tokens >= 3 * 2 * 15
    core.close()


def test_blocks_are_those_of_the_twin_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {str(length): tuple(random_tokens(DEEP, length, length)) for length in (90, 120, 40)}
    core, backend = core_with(DEEP, BLOCKS, kv_cache_bytes=450_000, max_step_tokens=24, context_length=256)
    reads = BlockReads(drafter_of(backend), reader_of(drafter_of(backend)), monkeypatch)
    texts = answered(core, prompts, 60)
    assert core.scheduler.counts.num_preemptions > 0
    sequences = sorted({block[0] for block in reads.blocks})
    for sequence, text in zip(sequences, texts.values(), strict=True):
        errors = reads.errors(DEEP, BLOCKS, text, sequence)
        assert len(errors) > 20
        assert max(errors) <= 1e-4
    core.close()


def test_a_block_has_no_more_tokens_than_in_training() -> None:
    with pytest.raises(InvalidRequestError, match="a block of 8 tokens drafts 7 at most, not 8"):
        core_with(DEEP, BLOCKS, speculative_tokens=8)


LENDING = replace(DEEP, windows=(None, 40, 40))
ASSISTANT = assistant_head(LENDING, None)


@pytest.mark.parametrize("length", [8, 600])
def test_an_assistants_logits_are_those_of_the_twin_in_chunks_and_after_a_prefix(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(random_tokens(LENDING, length, 3))
    core, backend = core_with(LENDING, ASSISTANT)
    reads = AssistantReads(drafter_of(backend), reader_of(drafter_of(backend)), monkeypatch)
    for turn in ("first", "again"):  # the second one begins with the blocks of the first
        reads.chains.clear()
        text = answered(core, {turn: prompt}, 20)[turn]
        errors = reads.errors(LENDING, ASSISTANT, text, reads.chains[0][0])
        assert len(errors) >= 3 * 15
        assert max(errors) <= 1e-4
    counts = core.scheduler.counts
    assert (counts.prefix_cache_hits > 0) is (length == 600)
    assert counts.draft_tokens >= 3 * 2 * 15
    core.close()


def test_an_assistants_logits_are_those_of_the_twin_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {str(length): tuple(random_tokens(LENDING, length, length)) for length in (90, 120, 40)}
    core, backend = core_with(LENDING, ASSISTANT, kv_cache_bytes=230_000, max_step_tokens=24, context_length=256)
    reads = AssistantReads(drafter_of(backend), reader_of(drafter_of(backend)), monkeypatch)
    texts = answered(core, prompts, 60)
    assert core.scheduler.counts.num_preemptions > 0
    sequences = sorted({chain[0] for chain in reads.chains})
    for sequence, text in zip(sequences, texts.values(), strict=True):
        errors = reads.errors(LENDING, ASSISTANT, text, sequence)
        assert len(errors) > 20
        assert max(errors) <= 1e-4
    core.close()


def test_packed_weights_of_an_assistant(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(LENDING, weights="Q8_0")
    drafter = assistant_head(recipe, None)
    core, backend = core_with(recipe, drafter)
    reads = AssistantReads(drafter_of(backend), reader_of(drafter_of(backend)), monkeypatch)
    text = answered(core, {"a": tuple(random_tokens(recipe, 70, 3))}, 20)["a"]
    errors = reads.errors(recipe, drafter, text, reads.chains[0][0])
    assert len(errors) > 40
    assert max(errors) < 0.1
    core.close()


def test_an_assistant_takes_no_blocks() -> None:
    """It reads its model's: capacity, and what is copied of a block, are those of the model alone."""
    core, backend = core_with(LENDING, ASSISTANT)
    other, alone = core_with(LENDING, roughly(LENDING, 0.0))
    own = drafter_of(backend).capacity()
    assert (own.kv_cache_bytes, own.num_blocks) == (0, backend.capacity().num_blocks)
    assert [2 * size for size in backend.part_bytes] == list(alone.part_bytes)
    for each in (core, other):
        each.close()


def assistant_of(**fields: Any) -> ModelSource:
    """Of another model than `DEEP`."""
    return assistant_head(replace(DEEP, **fields), None)


def reading(layers: tuple[int, ...]) -> ModelSource:
    head = HEADS["eagle3"][1]
    inputs = head.spec.next_token
    assert isinstance(inputs, PairedInputs)
    changed = replace(inputs, fusion=replace(inputs.fusion, layers=layers))
    return replace(head, spec=replace(head.spec, next_token=changed))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (next_token_block(replace(RECIPE, hidden_size=96)), "reads hidden states of 96 numbers, and the model's 64"),
        (
            eagle3_head(replace(DEEP, hidden_size=96), None),
            "reads 288 numbers of 3 layers, and the model's have 64 each",
        ),
        (assistant_of(hidden_size=96), "the assistant reads hidden states of 96 numbers, and the model's 64"),
        (
            ASSISTANT,
            "reads other keys than layer 2 of the model has: 1 of 32 numbers in a window of 40 and 1 of 32 num",
        ),
        (
            assistant_of(head_size=16),
            "layer 0 of the assistant reads other keys than layer 0 of the model has: 1 of 16",
        ),
        (assistant_of(windows=(None,) * 4), "layer 1 of the assistant reads no keys of the model"),
        (assistant_of(vocab_size=48), "vocabulary has 48 ids, and the model's 96"),
        (reading((0, 3, 1)), "reads layers 0, 3, 1, and the model has 3"),
        (reading((-1, 2, 1)), "reads layers -1, 2, 1, and the model has 3"),
    ],
)
def test_heads_on_other_states_are_refused(head: ModelSource, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        core_with(DEEP, head)
