"""Rules that every answer keeps, for any request."""

from __future__ import annotations

import json
from typing import Any

_END = b"data: [DONE]"
_ENDS = ("response.completed", "response.incomplete", "message_stop")
OVERLOAD = (503, 529)
_ERROR_KEYS = {"message", "type", "param", "code"}
_ANTHROPIC, _OLLAMA = "/v1/messages", "/api/"


def answer_fault(path: str, status: int, content_type: str, body: bytes) -> str | None:
    """The fault of an answer, or None. A complete 200, and 4xx in the dialect's format, are right; 5xx is not."""
    if status >= 500 and status not in OVERLOAD:
        return f"status {status}: {_shown(body)}"
    if status != 200:
        return _envelope_fault(path, status, body)
    if content_type.startswith("text/event-stream"):
        return _stream_fault(body)
    if content_type.startswith("application/x-ndjson"):
        return _lines_fault(body)
    return None if _parsed(body) is not None else f"an answer that is no JSON: {_shown(body)}"


def _envelope_fault(path: str, status: int, body: bytes) -> str | None:
    parsed = _parsed(body)
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if path.startswith(_OLLAMA):
        message, is_right = error, True
    elif path.startswith(_ANTHROPIC):
        is_right = isinstance(error, dict) and {"type", "message"} <= set(error) and parsed["type"] == "error"
        message = error["message"] if is_right else None
    else:
        is_right = isinstance(error, dict) and set(error) == _ERROR_KEYS
        message = error["message"] if is_right else None
    if not is_right or not isinstance(message, str):
        return f"status {status} without the dialect's error: {_shown(body)}"
    if "Traceback" in message or "\n" in message:
        return f"status {status} with more than a line: {_shown(body)}"
    return None


def _lines_fault(body: bytes) -> str | None:
    """A stream of lines ends with one that is done, or an error."""
    last = _parsed(body.rstrip().rpartition(b"\n")[2])
    if isinstance(last, dict) and (last.get("done") is True or "error" in last or last.get("status") == "success"):
        return None
    return f"a stream that is cut off: {_shown(body[-300:])}"


def _stream_fault(body: bytes) -> str | None:
    """A stream ends with [DONE], with a response that ended, or with an error that is no server's error."""
    events = [
        part.partition(b"\n")[2] or part for part in body.split(b"\n\n") if part.startswith((b"data: ", b"event: "))
    ]
    if not events:
        return f"a stream without events: {_shown(body)}"
    if events[-1] == _END:
        return None
    last = _parsed(events[-1][len(b"data: ") :])
    if isinstance(last, dict) and last.get("type") in _ENDS:
        return None
    error = last.get("error") if isinstance(last, dict) else None
    if not isinstance(error, dict):
        return f"a stream that is cut off: {_shown(events[-1])}"
    if error.get("type") in ("server_error", "api_error"):
        return f"a server's error in a stream: {_shown(events[-1])}"
    return None


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _shown(body: bytes) -> str:
    return repr(body[:300])
