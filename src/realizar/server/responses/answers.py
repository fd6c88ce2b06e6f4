"""`ResponseForm`: the response object of a request, at its beginning, at its end and between."""

from __future__ import annotations

from typing import Any

import msgspec

from realizar.server.api import Api, now_s
from realizar.server.errors import ApiError
from realizar.server.generation.answer import FinishReason
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.usage import prompt_counts
from realizar.server.responses.records import InputDetails, OutputDetails, ResponsesRequest, ResponseUsage
from realizar.server.responses.tools import ResponseTools

_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
"""Fields of a request that its response repeats as they are."""


class ResponseForm:
    """Makes the response objects of one request.

    Args:
        stored: True if the response will be kept.
    """

    def __init__(
        self,
        api: Api,
        request: ResponsesRequest,
        tools: ResponseTools,
        plan: ChatPlan,
        response_id: str,
        *,
        stored: bool,
    ) -> None:
        reasoning, text = request.reasoning, request.text
        form = None if text is None else text.format
        named = {} if form is None else {name: value for name, value in _fields(form) if value is not None}
        self.id = response_id
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": now_s(),
            "model": api.model.name,
            "background": False,
            **{name: getattr(request, name) for name in _REPEATED},
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
            },
            "service_tier": "default",
            "store": stored,
            "temperature": plan.sampling.temperature,
            "presence_penalty": plan.sampling.presence_penalty,
            "frequency_penalty": plan.sampling.frequency_penalty,
            "text": {"format": named or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": msgspec.Raw(msgspec.json.encode(tools.shown)),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": plan.sampling.top_p,
            "truncation": request.truncation or "disabled",
            **({"dropped_messages": plan.num_dropped} if plan.num_dropped else {}),
        }

    def begun(self) -> dict[str, Any]:
        """The object before any output."""
        return self._object("in_progress", [])

    def ended(self, output: list[dict[str, Any]], usage: ResponseUsage, reason: FinishReason) -> dict[str, Any]:
        """The object of an answer that ended."""
        if reason != "length":
            return self._object("completed", output, usage=usage, completed_at=now_s())
        details = {"reason": "max_output_tokens"}
        return self._object("incomplete", output, usage=usage, incomplete_details=details)

    def failed(self, output: list[dict[str, Any]], error: ApiError) -> dict[str, Any]:
        """The object of an answer that an error ended."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return self._object("failed", output, error={"code": code, "message": error.message})

    def _object(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        empty = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": output, **empty, **fields}


def usage_of(api: Api, plan: ChatPlan, run: ChatRun) -> ResponseUsage:
    """The counts of an answer."""
    num_prompt, num_output = len(plan.token_ids), run.num_completion_tokens
    prompt = prompt_counts(api, plan, run)
    return ResponseUsage(
        num_prompt,
        InputDetails(prompt.num_cached, prompt.num_created),
        num_output,
        OutputDetails(run.num_reasoning_tokens),
        num_prompt + num_output,
        run.state_snapshots,
    )


def _fields(record: msgspec.Struct) -> list[tuple[str, Any]]:
    return [(name, getattr(record, name)) for name in record.__struct_fields__]
