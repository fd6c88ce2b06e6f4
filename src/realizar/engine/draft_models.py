"""`resolve_drafted` finds and opens what drafts for a model: another model, or a head that reads its states."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from realizar.backends.base import NO_OTHERS, ModelSource, OtherModels
from realizar.backends.devices import ChosenDevice
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.select import refusal, resolve_model
from realizar.backends.supported import find_drafter
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import find_drafter_files, open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import CheckpointError, InvalidRequestError, TokenizerError, UnsupportedModelError
from realizar.hub.pull import resolve
from realizar.models.check_tensors import check_tensors
from realizar.models.drafters.describe import describe_drafter, is_made_for_model
from realizar.models.spec import ModelSpec
from realizar.tokenizer.load import load_tokenizer

_STRANGERS = 100  # one id in so many may stand for something else, as files name ids that no text has differently


class DraftedModel(NamedTuple):
    """A model as of `resolve_model`, and what is loaded beside it.

    Attributes:
        config: its `drafter` is a path, or `auto` where the block of the model's own file drafts.
        refused: why files that lie beside the model do not draft, if none does.
    """

    spec: ModelSpec
    config: ResolvedConfig
    others: OtherModels
    refused: tuple[str, ...] = ()


def resolve_drafted(
    checkpoint: Checkpoint, config: EngineConfig, device: ChosenDevice | None = None, memory_bytes: int | None = None
) -> DraftedModel:
    """Resolve a model as `resolve_model` does, and open what drafts for it.

    A drafter of `auto` is the block of the model's own file, else the first file beside it that suits the model and
    runs on its device. Raises as `resolve_model` and `open_drafter`.
    """
    spec, resolved = resolve_model(checkpoint, config, device, memory_bytes)
    refused = []
    if config.drafter == "auto" and resolved.drafter != "auto" and config.speculative_tokens != 0:
        for path in find_drafter_files(checkpoint):
            named = replace(config, drafter=str(path))
            spec, with_file = resolve_model(checkpoint, named, resolved.chosen, memory_bytes)
            try:
                others = open_drafter(checkpoint, with_file)
                _check_drafter(others, spec, with_file)
                return DraftedModel(spec, with_file, others)
            except (CheckpointError, InvalidRequestError, TokenizerError, UnsupportedModelError) as error:
                refused.append(f"{path.name} does not draft: {error}")
    return DraftedModel(spec, resolved, open_drafter(checkpoint, resolved), tuple(refused))


def _check_drafter(others: OtherModels, spec: ModelSpec, config: ResolvedConfig) -> None:
    """Raise for a drafter that does not suit a model or does not run on its device."""
    drafter = find_drafter(others, spec, config)
    if drafter is None:
        return
    check_tensors(drafter.spec, drafter.checkpoint)
    if (reason := refusal(drafter.spec, config.chosen.kind)) is not None:
        raise UnsupportedModelError(reason)


def open_drafter(checkpoint: Checkpoint, config: ResolvedConfig) -> OtherModels:
    """The model, or next-token block, that drafts for a checkpoint's, fetched if needed; empty where none does.

    Raises:
        HubError: it can't be found or fetched. CheckpointError: a file is malformed.
        UnsupportedModelError: its ids stand for other texts than the model's, or its context is shorter.
        TokenizerError: a vocabulary can't be read.
    """
    sizes = config.context_length, config.expert_used_count
    if config.drafter == "auto" and config.speculative_tokens:
        found = describe_drafter(checkpoint, checkpoint, *sizes)
        return NO_OTHERS if found is None else {"drafter": ModelSource(*found)}
    name = config.draft_model
    if name is None:
        return NO_OTHERS
    drafter = open_checkpoint(resolve(name))
    if is_made_for_model(drafter):
        if "tokenizer.ggml.tokens" in drafter.metadata or drafter.tokenizer_path is not None:
            _check_vocabularies(drafter, checkpoint)
        found = describe_drafter(drafter, checkpoint, *sizes)
    else:
        _check_vocabularies(drafter, checkpoint)
        try:
            found = describe_drafter(drafter, checkpoint, *sizes)
        except (UnsupportedModelError, InvalidRequestError) as error:
            raise UnsupportedModelError(f"the drafter {name}: {error}") from error
    assert found is not None
    return {"drafter": ModelSource(*found)}


def _check_vocabularies(drafter: Checkpoint, checkpoint: Checkpoint) -> None:
    own, other = (load_tokenizer(each).vocabulary_bytes() for each in (drafter, checkpoint))
    strange = [index for index, (first, second) in enumerate(zip(own, other, strict=False)) if first != second]
    if _STRANGERS * len(strange) > min(len(own), len(other)):
        index = strange[0]
        raise UnsupportedModelError(
            f"the drafter {drafter.path.name} has another vocabulary: {len(strange)} of its ids stand for other texts,"
            f" such as {index}, {own[index]!r} for the model's {other[index]!r}"
        )
