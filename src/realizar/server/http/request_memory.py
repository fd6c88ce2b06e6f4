"""Memory of requests that are being read and answered: a total for all, and a share for each client."""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from realizar.server.errors import ApiError
from realizar.server.http.clients import client_of
from realizar.server.http.memory_return import return_memory

FREE_BYTES = 32 << 10
"""A body up to this size costs nothing: connections are bounded too."""
_RETRY_AFTER_S = 1
_WORTH_RETURNING_BYTES = 1 << 20
_BYTES_PER_LOGPROB = 500  # measured: records, names and the answer's objects
_BYTES_PER_TOP_LOGPROB = 150
_BYTES_PER_VALUE = 32  # of a vector: float32, up to 25 characters of JSON, and the room that a growing text takes
_BYTES_PER_BASE64_VALUE = 12


class RequestMemory:
    """Counts what large bodies hold. A client may have as much as is left then, so one alone has half of the total.

    Args:
        total_bytes: for all clients together.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = self._free = total_bytes
        self._held: Counter[str] = Counter()

    def lease(self, client: str) -> RequestLease:
        """What one request holds; to be released when it has been answered."""
        return RequestLease(self, client)

    def take(self, client: str, num_bytes: int, held_bytes: int = 0) -> None:
        """Count more bytes as a client's.

        Args:
            held_bytes: that the same request holds already.

        Raises:
            ApiError: 429, its requests hold its share already; 413, even an idle server would not let it have so many.
        """
        held = self._held[client]
        self._check_most(num_bytes, held_bytes)
        if held + num_bytes > self._free - num_bytes:
            raise ApiError(
                429,
                f"this client's large requests hold {held >> 10} KiB, and {num_bytes >> 10} KiB more are above its "
                "share (--request-memory); try again when some have been answered",
                kind="rate_limit_error",
                code="too_much_in_flight",
                headers={"retry-after": str(_RETRY_AFTER_S)},
            )
        self._count(client, num_bytes)

    def add(self, client: str, num_bytes: int, held_bytes: int) -> None:
        """Count what a request that runs has come to hold, whatever else is held: new ones find less.

        Raises:
            ApiError: 413, as `take`.
        """
        self._check_most(num_bytes, held_bytes)
        self._count(client, num_bytes)

    def _check_most(self, num_bytes: int, held_bytes: int) -> None:
        most = self._total // 2
        if held_bytes + num_bytes > most:
            raise ApiError(
                413,
                f"the request and its answer take {held_bytes + num_bytes >> 10} KiB; at most {most >> 10} KiB are "
                "allowed (--request-memory)",
                code="request_too_large",
                headers={"connection": "close"},
            )

    def _count(self, client: str, num_bytes: int) -> None:
        self._held[client] += num_bytes
        self._free -= num_bytes

    def give(self, client: str, num_bytes: int) -> None:
        """Give back what was taken."""
        self._free += num_bytes
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]


class RequestLease:
    """The memory of one request. Attributes: client: whose it is. body_bytes: size of its body, once it is read."""

    def __init__(self, memory: RequestMemory, client: str) -> None:
        self._memory, self.client = memory, client
        self._held = self._logprobs = 0
        self.body_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Hold so many bytes in all, or more if more are held.

        Raises:
            ApiError: 429, above the client's share; 413, above any share.
        """
        wanted = num_bytes - self._held if num_bytes > FREE_BYTES else 0
        if wanted > 0:
            self.take(wanted)

    def hold_logprobs(self, num_tokens: int, num_top: int) -> None:
        """Before a request runs: hold its prompt's log-probabilities, beside what is held. Raises what `hold` does.

        Args:
            num_top: of the most probable tokens, listed for each.
        """
        if num_bytes := self._due(num_tokens, num_top):
            self.take(num_bytes)

    def begin_logprobs(self) -> None:
        """Before a request runs: hold its answer's first log-probabilities. Raises what `hold` does."""
        self.take(FREE_BYTES)

    def add_logprobs(self, num_tokens: int, num_top: int) -> None:
        """While a request runs: count log-probabilities of its answer. It is not ended for what others hold.

        Raises:
            ApiError: 413, it alone holds more than any share.
        """
        if num_bytes := self._due(num_tokens, num_top):
            self._memory.add(self.client, num_bytes, self._held)
            self._held += num_bytes

    def _due(self, num_tokens: int, num_top: int) -> int:
        """Bytes to count now, as small amounts are gathered first."""
        self._logprobs += num_tokens * (_BYTES_PER_LOGPROB + num_top * _BYTES_PER_TOP_LOGPROB)
        if self._logprobs <= FREE_BYTES:
            return 0
        due, self._logprobs = self._logprobs, 0
        return due

    def hold_vectors(self, num_vectors: int, width: int, *, as_base64: bool) -> int:
        """Hold an answer of so many vectors beside what is held; return its bytes. Raises what `hold` does."""
        size = num_vectors * width * (_BYTES_PER_BASE64_VALUE if as_base64 else _BYTES_PER_VALUE)
        if size > FREE_BYTES:
            self.take(size)
        return size

    def take(self, num_bytes: int) -> None:
        """Hold so many bytes more. Raises what `hold` does."""
        self._memory.take(self.client, num_bytes, self._held)
        self._held += num_bytes

    def release(self) -> None:
        """Give all back."""
        if self._held:
            self._memory.give(self.client, self._held)
            if self._held >= _WORTH_RETURNING_BYTES:
                return_memory()
            self._held = 0


class RequestMemoryMiddleware:
    """Gives every request its lease, in `scope["state"]["lease"]`, and takes it back.

    Args:
        total_bytes: for all clients together.
        has_keys: whether clients are known by keys.
    """

    def __init__(self, app: ASGIApp, total_bytes: int, *, has_keys: bool) -> None:
        self._app, self._has_keys = app, has_keys
        self._memory = RequestMemory(total_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lease = self._memory.lease(client_of(scope, has_keys=self._has_keys))
        scope["state"]["lease"] = lease
        try:
            await self._app(scope, receive, send)
        finally:
            lease.release()


def lease_of(request: Request) -> RequestLease:
    """The lease of a request."""
    lease = request.scope["state"]["lease"]
    if not isinstance(lease, RequestLease):
        raise TypeError("the request has no lease")
    return lease
