"""`describe_drafter` describes what drafts for a model, whichever kind of drafter it is. numpy only."""

from __future__ import annotations

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.drafters.assistant import build_assistant, is_assistant
from realizar.models.drafters.dflash import build_dflash, is_dflash
from realizar.models.drafters.eagle3 import build_eagle3, is_eagle3
from realizar.models.next_token import is_next_token_file, with_shortlist
from realizar.models.registry import build_next_token_block, build_spec
from realizar.models.spec import ModelSpec

_MADE_FOR_MODELS = ((is_eagle3, build_eagle3), (is_dflash, build_dflash), (is_assistant, build_assistant))
"""Tells drafters in files of their own that are nothing without their model, and describes them beside it."""


def is_made_for_model(drafter: Checkpoint) -> bool:
    """True for a drafter that is nothing without its model."""
    return any(is_one(drafter) for is_one, _ in _MADE_FOR_MODELS)


def describe_drafter(
    drafter: Checkpoint, model: Checkpoint, context_length: int | None, expert_used_count: int | None
) -> tuple[ModelSpec, Checkpoint] | None:
    """A drafter, and its checkpoint with what it takes of the model's; None where a model has no block of its own.

    Where both are one checkpoint it is the block of that. Numbers are those of the model's configuration.

    Raises as `build_spec`.
    """
    if drafter is model:
        block = build_next_token_block(model, context_length)
        return None if block is None else (with_shortlist(block), model)
    build = next((build for is_one, build in _MADE_FOR_MODELS if is_one(drafter)), None)
    if build is not None:
        return build(drafter, build_spec(model, context_length, expert_used_count), model)
    block = build_next_token_block(drafter, context_length) if is_next_token_file(drafter) else None
    return (build_spec(drafter, context_length) if block is None else with_shortlist(block)), drafter
