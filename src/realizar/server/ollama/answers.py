"""`Answering` makes an answer of Ollama's API: a line of JSON for each part and one for the end, or all in one object.

A line of a stream has what its part adds; the last one has no text, the reason of the end, and the figures.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, new_id
from realizar.server.generation.answer import AnswerDelta, FinishReason
from realizar.server.generation.answer_events import AnswerEvents, Encoder
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.logprob_rows import RowsOfKinds, chat_rows
from realizar.server.http.request import note
from realizar.server.http.request_memory import lease_of
from realizar.server.ollama.parts import Part, Parts, joined
from realizar.server.ollama.times import Clock, now

_encode = msgspec.json.Encoder().encode


class Form(Protocol):
    """The form of a route's answers."""

    def show(self, part: Part) -> dict[str, Any]:
        """The fields of a part; those of an empty one are in every answer."""

    def last(self, token_ids: list[int]) -> dict[str, Any]:
        """Fields of the end alone. Args: token_ids: those that were generated."""


class Answering(Encoder[AnswerDelta]):
    """Answers one request.

    Args:
        name: the model's name, as the request has it.
        clock: began as the request came.
        with_thinking: False to leave reasoning out.
    """

    def __init__(
        self, api: Api, plan: ChatPlan, run: ChatRun, form: Form, clock: Clock, name: str, *, with_thinking: bool
    ) -> None:
        self._api, self._plan, self._run, self._form, self._clock, self._name = api, plan, run, form, clock, name
        self._parts = Parts(with_thinking=with_thinking)
        self._token_ids: list[int] = []
        self._reason: FinishReason = "stop"
        top = plan.sampling.logprobs
        rows = None if top is None else api.token_names.rows(chat_rows, top)
        self._rows = None if rows is None else RowsOfKinds(rows, ("content", "reasoning", "other"))

    def grown(self, delta: AnswerDelta) -> bytes:
        return b"".join(map(self._line, self.take_in(delta)))

    def last(self) -> bytes:
        return self._line(Part(), self._end())

    def whole(self, parts: list[Part]) -> bytes:
        """The whole answer, of all its parts."""
        return self._line(joined(parts), self._end())

    def take_in(self, delta: AnswerDelta) -> list[Part]:
        """The parts that a delta completes."""
        self._clock.came()
        self._token_ids += delta.source.token_ids
        made = list(self._parts.take_in(delta.parsed))
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            made += self._parts.finish()
        if self._rows is not None and (listed := self._rows.take_in(delta)):
            made = made or [Part()]
            made[0].logprobs = listed
        return made

    def _end(self) -> dict[str, Any]:
        run = self._run
        figures = self._clock.figures(len(self._plan.token_ids), run.num_completion_tokens, run.output)
        reason = "length" if self._reason == "length" else "stop"
        snapshots = run.state_snapshots
        used = {} if snapshots is UNSET else {"state_snapshots": snapshots}
        return {"done_reason": reason, **self._form.last(self._token_ids), **figures, **used}

    def _line(self, part: Part, end: dict[str, Any] | None = None) -> bytes:
        head = {"model": self._name, "created_at": now(), **self._form.show(part)}
        if part.logprobs:
            head["logprobs"] = msgspec.Raw(b"[%b]" % b",".join(part.logprobs))
        return _encode({**head, "done": end is not None, **(end or {})}) + b"\n"


async def answer(
    request: Request,
    api: Api,
    plan: ChatPlan,
    form: Form,
    clock: Clock,
    name: str,
    *,
    stream: bool,
    with_thinking: bool,
) -> Response:
    """Answer a request, whole or as a stream. The arguments are those of `Answering`."""
    note(request, model=api.model.name, prompt=len(plan.token_ids))
    run = ChatRun(api, plan, new_id("ollama-"), lease_of(request))
    answering = Answering(api, plan, run, form, clock, name, with_thinking=with_thinking)
    events, parts = AnswerEvents(request, run, api.settings), list[Part]()
    clock.submitted()
    if stream:
        return events.stream(answering)
    await events.whole(lambda delta: parts.extend(answering.take_in(delta)))
    return Response(answering.whole(parts), media_type="application/json")


def loaded(form: Form, name: str, *, unload: bool) -> Response:
    """The answer to a request that only asks for its model to be loaded or unloaded: it is."""
    reason = "unload" if unload else "load"
    body = {"model": name, "created_at": now(), **form.show(Part()), "done": True, "done_reason": reason}
    return Response(_encode(body), media_type="application/json")
