"""`POST /api/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, compute
from realizar.server.errors import refused
from realizar.server.generation.chat_plan import ChatPlan, plan_chat
from realizar.server.generation.text_plan import after_ids, plan_text
from realizar.server.generation.work import Stop
from realizar.server.http.body import read_record
from realizar.server.ollama.answers import answer, loaded
from realizar.server.ollama.conversation import check_answer_fields, read_generate, shows_thinking
from realizar.server.ollama.messages import check_images
from realizar.server.ollama.names import model_for, unloads
from realizar.server.ollama.options import OPTION_NAMES, read_options
from realizar.server.ollama.parts import Part
from realizar.server.ollama.records import GenerateRequest
from realizar.server.ollama.times import Clock


class GenerateForm:
    """The form of `/api/generate`: a text.

    Args:
        prompt_ids: the prompt, which begins the `context` of the end; None for an answer without one.
    """

    def __init__(self, prompt_ids: Sequence[int] | None = None) -> None:
        self._prompt_ids = prompt_ids

    def show(self, part: Part) -> dict[str, Any]:
        """See `Form`."""
        return {"response": part.content, **({"thinking": part.thinking} if part.thinking else {})}

    def last(self, token_ids: list[int]) -> dict[str, Any]:
        """See `Form`."""
        return {} if self._prompt_ids is None else {"context": [*self._prompt_ids, *token_ids]}


async def generate(request: Request) -> Response:
    """Answer a prompt, whole or as a stream of lines."""
    clock = Clock()
    record = await read_record(request, GenerateRequest)
    if not record.prompt and not record.suffix:
        return loaded(GenerateForm(), record.model, unload=await unloads(request, record.model, record.keep_alive))
    api = await model_for(request, record.model, record.keep_alive, clock)
    plan = await compute(request, lambda stop: plan_generate(api, record, stop))
    return await answer(
        request,
        api,
        plan,
        GenerateForm(None if _is_text(api, record) else plan.token_ids),
        clock,
        record.model,
        stream=record.stream is not False,
        with_thinking=shows_thinking(record),
    )


def plan_generate(api: Api, record: GenerateRequest, stop: Stop) -> ChatPlan:
    """Check a request and prepare its prompt. This may take a second, so it must not run on the event loop.

    Raises:
        ApiError, RealizarError: the request is refused.
    """
    check_answer_fields(record)
    check_images("", record.images)
    _check_context(api, record.context or ())
    if not _is_text(api, record):
        plan = plan_chat(api, read_generate(api, record), stop)
        return after_ids(api, plan, record.context) if record.context else plan
    for name in ("system", "context", "think"):
        if getattr(record, name):
            raise refused(f"{name} can't be combined with {_reason(record)}", name)
    wishes = read_options(api, record)
    return plan_text(api, record.prompt or "", record.suffix or "", wishes, OPTION_NAMES, stop)


def _is_text(api: Api, record: GenerateRequest) -> bool:
    """True if the answer goes on with the prompt, or fills a hole after it."""
    return bool(record.raw or record.suffix) or api.model.template is None


def _reason(record: GenerateRequest) -> str:
    if record.suffix:
        return "suffix"
    return "raw" if record.raw else "a model that has no chat template"


def _check_context(api: Api, given: Sequence[int]) -> None:
    if len(given) > api.max_tokens:
        raise refused(f"context has {len(given)} tokens, above the context of {api.max_tokens}", "context")
    size = api.model.tokenizer.vocab_size
    wrong = next((token_id for token_id in given if not 0 <= token_id < size), None)
    if wrong is not None:
        raise refused(f"context holds token id {wrong}; the vocabulary has 0 to {size - 1}", "context")
