"""`plan_text` prepares a text to go on with, without a chat template; `after_ids` puts ids before a prepared prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from realizar.sampling_params import SamplingParams
from realizar.server.api import Api
from realizar.server.errors import renaming
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.prompts import read_hole, tokenize_prompts
from realizar.server.generation.sampling import SamplingWishes, build_sampling
from realizar.server.generation.tools import ToolPlan
from realizar.server.http.work import Stop
from realizar.tokenizer.parsers.choose import find_format


def plan_text(
    api: Api, text: str, suffix: str, wishes: SamplingWishes, names: Mapping[str, str], stop: Stop
) -> ChatPlan:
    """Prepare a text. This may take a second, so it must not run on the event loop.

    An empty `suffix` goes on with the text; another is what follows the answer, for models that fill in a hole. `stop`
    is checked between the parts of the work. Raises ApiError or RealizarError where the request is refused.
    """
    tokenizer, most = api.model.tokenizer, api.max_tokens
    with renaming(names):
        sampling = build_sampling(wishes, api.model)
        hole = read_hole(suffix, tokenizer, most, add_special=True) if suffix else None
        (prompt,) = tokenize_prompts(
            text,
            tokenizer,
            stop,
            param="prompt",
            max_prompts=1,
            max_tokens=most,
            add_special=True,
            hole=hole,
        )
    sampling, cut = _fitting(sampling, most - len(prompt.token_ids))
    return ChatPlan(
        token_ids=prompt.token_ids,
        sampling=sampling,
        tools=ToolPlan(),
        answer_format=find_format(None),
        prompt_end="",
        priority=0,
        cache_salt=None,
        names={"prompt": "prompt", "structured": names.get("structured", "structured")},
        cut_by_context=cut,
    )


def after_ids(api: Api, plan: ChatPlan, earlier: Sequence[int]) -> ChatPlan:
    """A plan whose prompt comes after the ids, at least one, of an earlier exchange, which have the only BOS."""
    own = plan.token_ids
    if own[:1] == (api.model.tokenizer.bos_id,):
        own = own[1:]
    token_ids = (*earlier, *own)
    sampling, cut = _fitting(plan.sampling, api.max_tokens - len(token_ids))
    return replace(plan, token_ids=token_ids, sampling=sampling, cut_by_context=cut or plan.cut_by_context)


def _fitting(sampling: SamplingParams, room: int) -> tuple[SamplingParams, bool]:
    """Sampling of at most the tokens that the context leaves, and True if these are fewer than were asked for."""
    if sampling.max_tokens is None or not 0 < room < sampling.max_tokens:
        return sampling, False
    return replace(sampling, max_tokens=room), True
