"""What a head computed beside the model whose states it reads, held to the twin in numpy, on any backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from random_models import Recipe, random_model
from realizar.backends.base import BlocksAhead, Drafts, FollowsDrafts, ForwardInput, ModelSource, SampledAhead, TokenIds
from reference_model import ReferenceModel, State
from reference_tensors import load_tensors


class StepReads(NamedTuple):
    """Ids, positions and logits, float32 [tokens, vocab_size], of the tokens of a step."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    logits: NDArray[np.float32]


ReadStep = Callable[[ForwardInput], StepReads]
"""Of the step that was submitted last."""


class Reads:
    """The logits that a head computed last after each token of a sequence: id and logits by position.

    Of tokens that it goes on from, only those are here which the host submitted.
    """

    def __init__(self, drafter: Drafts, read: ReadStep, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sequences: dict[int, dict[int, tuple[int, NDArray[np.float32]]]] = defaultdict(dict)
        honest = drafter.draft

        def draft(step: ForwardInput, ahead: SampledAhead | BlocksAhead | None = None) -> TokenIds:
            drafts = honest(step, ahead) + 0  # before its memory is written again
            owners = np.repeat(step.columns.sequence_ids, step.columns.num_tokens)
            for owner, token_id, position, logits in zip(owners, *read(step), strict=True):
                self.sequences[int(owner)][int(position)] = int(token_id), logits
            return drafts

        monkeypatch.setattr(drafter, "draft", draft)

    def errors(self, recipe: Recipe, drafter: ModelSource, text: list[int], num_prompt_tokens: int) -> list[float]:
        """Relative errors after the true tokens of the sequence that begins with a prompt, but the last one's."""
        expected, found = expected_logits(recipe, drafter, text), []
        for reads in self.sequences.values():
            if all(token_id == text[at] for at, (token_id, _) in reads.items() if at < num_prompt_tokens):
                for at, (token_id, logits) in reads.items():
                    if at < len(text) - 1 and token_id == text[at]:
                        found.append(float(np.linalg.norm(logits - expected[at]) / np.linalg.norm(expected[at])))
        return found


class BlockReads:
    """The blocks that a drafter of several tokens at once has computed: of each its row's sequence, ids and logits."""

    def __init__(self, drafter: Drafts, read: ReadStep, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[tuple[int, int, list[int], NDArray[np.float32]]] = []
        honest = drafter.draft

        def draft(step: ForwardInput, ahead: SampledAhead | BlocksAhead | None = None) -> TokenIds:
            drafts, found = honest(step, ahead) + 0, read(step)
            for sequence in np.unique(step.columns.sequence_ids):
                of_row = (step.columns.sequence_ids == sequence).nonzero()[0]
                ids, first = found.token_ids[of_row].tolist(), int(found.positions[of_row[0]])
                self.blocks.append((int(sequence), first, ids, found.logits[of_row]))
            return drafts

        monkeypatch.setattr(drafter, "draft", draft)

    def errors(self, recipe: Recipe, drafter: ModelSource, text: list[int], sequence: int) -> list[float]:
        """The largest relative error of each block of a sequence, whose tokens are the text's."""
        model, twin = _twins(recipe, drafter)
        states, found = twin.fused(model.streams(text)), []
        for owner, first, ids, logits in self.blocks:
            if owner == sequence:
                assert ids[0] == text[first]
                expected = twin.block(ids, states[:first])
                found.append(
                    float(np.max(np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)))
                )
        return found


class AssistantReads:
    """Drafts that an assistant has made one after another: of each first one its sequence, position, id and logits.

    A backend that goes on from drafts by itself makes each further one in rows of the step before.
    """

    def __init__(self, drafter: Drafts, read: ReadStep, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chains: list[tuple[int, int, int, list[NDArray[np.float32]]]] = []
        honest, running = drafter.draft, dict[int, list[NDArray[np.float32]]]()
        last: list[ForwardInput] = []

        def draft(step: ForwardInput, ahead: SampledAhead | BlocksAhead | None = None) -> TokenIds:
            drafts = honest(step, ahead) + 0
            last[:] = [step]
            for sequence, token_id, position, logits in zip(step.columns.sequence_ids, *read(step), strict=True):
                if token_id >= 0:
                    running[int(sequence)] = []
                    self.chains.append((int(sequence), int(position), int(token_id), running[int(sequence)]))
                running[int(sequence)].append(logits)
            return drafts

        monkeypatch.setattr(drafter, "draft", draft)
        if not isinstance(drafter, FollowsDrafts):
            return
        going_on, decode_kept, left = drafter.follow, drafter._decode_kept, list[NDArray[np.int32]]()

        def follow(wanted: NDArray[np.int32]) -> None:
            left[:] = [wanted]
            going_on(wanted)

        def decode(kind: Any, rows: int) -> None:
            decode_kept(kind, rows)
            left[0], step, logits = left[0] - 1, last[0], read(last[0]).logits
            for row in (left[0] > 0).nonzero()[0].tolist():
                running[int(step.columns.sequence_ids[row])].append(logits[row])

        monkeypatch.setattr(drafter, "follow", follow)
        monkeypatch.setattr(drafter, "_decode_kept", decode)

    def errors(self, recipe: Recipe, drafter: ModelSource, text: list[int], sequence: int) -> list[float]:
        """The relative error of the logits of each draft of a sequence, whose tokens are the text's."""
        model, twin = _twins(recipe, drafter)
        kept: State = {}
        states, found = model.hidden(text, kept), []
        for owner, position, token_id, chain in self.chains:
            if owner != sequence:
                continue
            assert token_id == text[position]
            given, before = (
                states[position - 1 : position],
                {layer: tuple(part[:position] for part in parts) for layer, parts in kept.items()},
            )
            for logits in chain:
                hidden = twin.hidden([token_id], before, given)
                (expected,) = twin.head(hidden)
                found.append(float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)))
                given, token_id = twin.handed_on(hidden), int(logits.argmax())
        return found


def expected_logits(recipe: Recipe, drafter: ModelSource, ids: list[int]) -> NDArray[np.float32]:
    """The head's logits after each token of a text, by the numpy twins of both."""
    model, twin = _twins(recipe, drafter)
    states = model.hidden(ids) if drafter.spec.fusion is None else twin.fused(model.streams(ids))
    before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])
    return np.asarray(twin.logits(ids, given=before))


def _twins(recipe: Recipe, drafter: ModelSource) -> tuple[ReferenceModel, ReferenceModel]:
    """In numpy, of a recipe's model and of what drafts for it."""
    spec, checkpoint = random_model(recipe)
    model = ReferenceModel(spec, load_tensors(spec, checkpoint))
    return model, ReferenceModel(drafter.spec, load_tensors(drafter.spec, drafter.checkpoint))
