"""`prompt_counts` tells what the prefix cache did with the tokens of a prompt."""

from __future__ import annotations

from typing import NamedTuple

from realizar.server.api import Api
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.chat_run import ChatRun


class PromptCounts(NamedTuple):
    """Tokens of a prompt: found in the cache, and computed in whole blocks that stay there. It may have others."""

    num_cached: int
    num_created: int


def prompt_counts(api: Api, plan: ChatPlan, run: ChatRun) -> PromptCounts:
    """The counts so far. Those of the cache are known from the first delta on."""
    num_prompt, cached = len(plan.token_ids), run.num_cached_tokens or 0
    block = api.engine.info.cached_block_tokens
    created = max(num_prompt // block * block - cached, 0) if block else 0
    return PromptCounts(cached, created)
