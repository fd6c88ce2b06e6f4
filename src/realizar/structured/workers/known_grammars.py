"""`KnownGrammars`: the compiled grammars with their holders, and the refused grammars."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from realizar.errors import InvalidRequestError, RequestFailedError
from realizar.outputs import ErrorCause
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.followed_rows import FollowedGrammar
from realizar.structured.workers.worker import WorkerLimits

_MOST_REFUSALS = 1024
_MOST_REFUSED_CHARACTERS = 16 << 20
_MEMORY_S = 600.0  # for refusals that the machine may have caused


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a grammar; it is forgotten at `until_s` of the clock."""

    reason: str
    cause: ErrorCause
    until_s: float

    def error(self) -> InvalidRequestError | RequestFailedError:
        """The error of a request with this grammar."""
        if self.cause == "request":
            return InvalidRequestError(self.reason, "structured")
        return RequestFailedError(self.reason)


class KnownGrammars:
    """The known grammars. Thread-safe.

    Args:
        drop: called with a grammar that no row will follow any more.
        clock: seconds, monotonic.
    """

    def __init__(
        self, limits: WorkerLimits, drop: Callable[[FollowedGrammar], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._drop, self._clock = limits, drop, clock
        self._lock = threading.Lock()
        self._grammars: OrderedDict[StructuredOutput, FollowedGrammar] = (
            OrderedDict()
        )  # the most recently requested one is last
        self._retired: list[FollowedGrammar] = []
        self._refusals: OrderedDict[StructuredOutput, Refusal] = OrderedDict()
        self._refused_characters = 0

    def has(self, structured: StructuredOutput) -> bool:
        """True if a grammar is compiled or was refused."""
        with self._lock:
            return structured in self._grammars or self._refusal(structured) is not None

    def check(self, structured: StructuredOutput) -> None:
        """Raise the error of a refused grammar: InvalidRequestError, or RequestFailedError if the machine caused it."""
        with self._lock:
            self._check(structured)

    def hold(
        self, request_id: str, structured: StructuredOutput, is_open: Callable[[str], bool], client: str = ""
    ) -> bool:
        """See `GrammarService.hold`."""
        with self._lock:
            self._check(structured)
            for grammar in (*self._grammars.values(), *self._retired):
                grammar.holders = {holder: whose for holder, whose in grammar.holders.items() if is_open(holder)}
            found = self._grammars.get(structured)
            if found is None:
                return False
            found.holders[request_id] = client
            self._grammars.move_to_end(structured)
            return True

    def add(self, grammar: FollowedGrammar) -> None:
        """Add a grammar that was compiled."""
        with self._lock:
            self._grammars[grammar.structured] = grammar

    def refuse(self, structured: StructuredOutput, reason: str, cause: ErrorCause) -> None:
        """Remember a refusal, as long as there is room, or for some minutes if the machine may have caused it."""
        with self._lock:
            self._retire(structured)
            known = self._refusal(structured)
            if known is not None and known.cause == "request":
                return
            if known is None:
                self._refused_characters += len(structured.value)
            until_s = math.inf if cause == "request" else self._clock() + _MEMORY_S
            self._refusals[structured] = Refusal(reason, cause, until_s)
            while len(self._refusals) > _MOST_REFUSALS or self._refused_characters > _MOST_REFUSED_CHARACTERS:
                dropped, _ = self._refusals.popitem(last=False)
                self._refused_characters -= len(dropped.value)

    def forget(self, structured: StructuredOutput) -> None:
        """Retire a grammar, so that no new row follows it."""
        with self._lock:
            self._retire(structured)

    def follow(self, structured: StructuredOutput) -> tuple[FollowedGrammar, Refusal | None]:
        """The grammar of a new row, and its refusal or None. One that was forgotten is known again."""
        with self._lock:
            found = self._grammars.get(structured)
            refusal = self._refusal(structured)
            if found is None:
                found = FollowedGrammar(structured, retired=refusal is not None)
                (self._retired.append(found) if found.retired else self._grammars.update({structured: found}))
            found.num_rows += 1
            return found, refusal

    def unfollow(self, grammar: FollowedGrammar) -> None:
        """Note that a row of a grammar has ended."""
        with self._lock:
            grammar.num_rows -= 1

    def drop_surplus(self) -> None:
        """Drop retired grammars, and idle ones above the limits."""
        with self._lock:
            surplus = [grammar for grammar in self._retired if not grammar.num_rows]
            self._retired = [grammar for grammar in self._retired if grammar.num_rows]
            idle = [grammar for grammar in self._grammars.values() if grammar.idle]
            count, size_bytes = self._usage()
            while idle and (
                len(idle) > self._limits.idle
                or count >= self._limits.grammars
                or size_bytes >= self._limits.total_bytes
            ):
                grammar = idle.pop(0)
                del self._grammars[grammar.structured]
                surplus.append(grammar)
                count, size_bytes = count - 1, size_bytes - grammar.size_bytes
        for grammar in surplus:
            self._drop(grammar)

    def usage(self) -> tuple[int, int]:
        """The number of grammars and the memory that they use together, in bytes."""
        with self._lock:
            return self._usage()

    def has_share(self, client: str) -> bool:
        """True if a client may have one more grammar. A client may use as much as is left free, so one alone gets half.

        The client "" is the process's own user, which has no bound.
        """
        with self._lock:
            used = [each for each in (*self._grammars.values(), *self._retired) if not each.idle]
            held = [each for each in used if client in each.holders.values()]
            most, most_bytes = self._limits.grammars - len(used), self._limits.total_bytes - _size_bytes(used)
            return not client or (len(held) < most and _size_bytes(held) < most_bytes)

    def close(self) -> None:
        """Drop all grammars."""
        with self._lock:
            grammars = [*self._grammars.values(), *self._retired]
            self._grammars.clear()
            self._retired.clear()
        for grammar in grammars:
            self._drop(grammar)

    def _usage(self) -> tuple[int, int]:
        grammars = (*self._grammars.values(), *self._retired)
        return len(grammars), _size_bytes(grammars)

    def _check(self, structured: StructuredOutput) -> None:
        refusal = self._refusal(structured)
        if refusal is not None:
            self._refusals.move_to_end(structured)
            raise refusal.error()

    def _refusal(self, structured: StructuredOutput) -> Refusal | None:
        """The remembered refusal of a grammar, or None; expired refusals are removed."""
        refusal = self._refusals.get(structured)
        if refusal is not None and self._clock() >= refusal.until_s:
            del self._refusals[structured]
            self._refused_characters -= len(structured.value)
            return None
        return refusal

    def _retire(self, structured: StructuredOutput) -> None:
        grammar = self._grammars.pop(structured, None)
        if grammar is not None:
            grammar.retired = True
            self._retired.append(grammar)


def _size_bytes(grammars: Iterable[FollowedGrammar]) -> int:
    return sum(grammar.size_bytes for grammar in grammars)
