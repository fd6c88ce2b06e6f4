"""`Parts` makes the parts of an answer in Ollama's form of its parsed output: calls are whole, arguments objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from realizar.server.generation.answer import WholeCall, arguments_object
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta


@dataclass(slots=True)
class Part:
    """The addition of one line of a stream to an answer, or the whole answer; `logprobs` are JSON of tokens."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)


class Parts:
    """Takes in what an answer gains, reasoning only with `with_thinking`, and gives the parts that are complete."""

    def __init__(self, *, with_thinking: bool) -> None:
        self._with_thinking = with_thinking
        self._call: WholeCall | None = None
        self._num_calls = 0

    def take_in(self, parsed: Iterable[ParsedDelta]) -> Iterator[Part]:
        """The parts that some output completes. A call is complete when something follows it."""
        for delta in parsed:
            match delta:
                case ContentDelta(text):
                    yield from self.finish()
                    yield Part(content=text)
                case ReasoningDelta(text):
                    yield from self.finish()
                    if self._with_thinking:
                        yield Part(thinking=text)
                case ToolCallDelta():
                    if delta.index >= self._num_calls:
                        yield from self.finish()
                        self._call = WholeCall(delta.id or "", delta.name or "")
                        self._num_calls += 1
                    if self._call is not None:
                        self._call.arguments += delta.arguments

    def finish(self) -> Iterator[Part]:
        """The call that is open, if one is."""
        if self._call is not None:
            call, self._call = self._call, None
            function = {
                "index": self._num_calls - 1,
                "name": call.name,
                "arguments": arguments_object(call.arguments),
            }
            yield Part(calls=[{"id": call.id, "function": function}])


def joined(parts: Iterable[Part]) -> Part:
    found = list(parts)
    return Part(
        "".join(part.content for part in found),
        "".join(part.thinking for part in found),
        [call for part in found for call in part.calls],
        [token for part in found for token in part.logprobs],
    )
