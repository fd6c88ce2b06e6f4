"""Memory of open requests and their answers: a total for all clients, and a share for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from realizar.request import Client
from realizar.server.errors import closing, later
from realizar.server.http.clients import Clients
from realizar.server.http.memory_return import return_memory

FREE_BYTES = 32 << 10
"""Bodies up to this size are not counted, as the number of connections bounds them."""
_WORTH_RETURNING_BYTES = 1 << 20
_BYTES_PER_LOGPROB = 500  # measured: records, names and the answer's objects
_BYTES_PER_TOP_LOGPROB = 150
_BYTES_PER_VALUE = 32  # of a vector: float32, up to 25 characters of JSON, and the room that a growing text takes
_BYTES_PER_BASE64_VALUE = 12


class RequestMemory:
    """Counts memory of requests. A client may hold as much as is left free, so a single one gets half.

    `option` bounds it, and `what` takes it, in errors.
    """

    def __init__(
        self, total_bytes: int, option: str = "--request-memory", what: str = "the request and its answer"
    ) -> None:
        self._total, self._option, self._what = total_bytes, option, what
        self._free = total_bytes
        self._held: Counter[str] = Counter()

    def take(self, client: str, num_bytes: int, held_bytes: int = 0, *, is_running: bool = False) -> None:
        """Take more bytes for a client, whose request holds `held_bytes` already.

        Those of a request that runs count whatever others hold; less is left for new ones. It raises ApiError 429 above
        the client's current share, and 413 above its share on an idle server.
        """
        held, most = self._held[client], self._total // 2
        if held_bytes + num_bytes > most:
            taken = f"{self._what} take {held_bytes + num_bytes >> 10} KiB"
            message = f"{taken}; at most {most >> 10} KiB are allowed ({self._option})"
            raise closing(413, message, "request_too_large")
        if not is_running and held + num_bytes > self._free - num_bytes:
            message = (
                f"this client's large requests hold {held >> 10} KiB, and {num_bytes >> 10} KiB more are above its "
                f"share ({self._option}); try again when some have been answered"
            )
            raise later(429, message, "too_much_in_flight", 1.0)
        self._held[client] += num_bytes
        self._free -= num_bytes

    def give(self, client: str, num_bytes: int) -> None:
        self._free += num_bytes
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]


class RequestLease:
    """What one request holds until its answer is complete; who makes it releases it then.

    Attributes:
        body_bytes: the size of its body, once it is read.

    Args:
        images: of prompts' images; without it they count as the rest does.
    """

    def __init__(self, memory: RequestMemory, client: Client, images: RequestMemory | None = None) -> None:
        self._memory, self._images, self.client = memory, images or memory, client
        self._held = self._held_of_images = self._logprobs = 0
        self._releases: list[Callable[[], None]] = []
        self.body_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Raise the total to `num_bytes`, unless more is already held.

        It raises ApiError 429 above the client's share, and 413 above any share.
        """
        wanted = num_bytes - self._held if num_bytes > FREE_BYTES else 0
        if wanted > 0:
            self.take(wanted)

    def hold_logprobs(self, num_tokens: int, num_top: int) -> None:
        """Hold the memory of a prompt's log-probabilities, `num_top` a token, before it runs. Raises as `hold`."""
        if num_bytes := self._due(num_tokens, num_top):
            self.take(num_bytes)

    def begin_logprobs(self) -> None:
        """Hold the memory of the answer's first log-probabilities, before the request runs. Errors as for `hold`."""
        self.take(FREE_BYTES)

    def add_logprobs(self, num_tokens: int, num_top: int) -> None:
        """Count log-probabilities of a running request's answer. Memory of other requests does not end it.

        It raises ApiError 413 if the request alone holds more than any share.
        """
        if num_bytes := self._due(num_tokens, num_top):
            self.take(num_bytes, is_running=True)

    def _due(self, num_tokens: int, num_top: int) -> int:
        """The bytes to count now; small amounts are collected first."""
        self._logprobs += num_tokens * (_BYTES_PER_LOGPROB + num_top * _BYTES_PER_TOP_LOGPROB)
        if self._logprobs <= FREE_BYTES:
            return 0
        due, self._logprobs = self._logprobs, 0
        return due

    def hold_vectors(self, num_vectors: int, width: int, *, as_base64: bool) -> None:
        """Hold the memory of an answer with `num_vectors` vectors. Raises as `hold`."""
        size = num_vectors * width * (_BYTES_PER_BASE64_VALUE if as_base64 else _BYTES_PER_VALUE)
        if size > FREE_BYTES:
            self.take(size)

    def hold_images(self, num_bytes: int) -> None:
        """Hold the memory of a prompt's images, encoded or not. Raises as `hold`."""
        self._images.take(self.client.name, num_bytes, self._held_of_images)
        self._held_of_images += num_bytes

    def at_end(self, release: Callable[[], None]) -> None:
        """Have something else released with the memory."""
        self._releases.append(release)

    def take(self, num_bytes: int, *, is_running: bool = False) -> None:
        self._memory.take(self.client.name, num_bytes, self._held, is_running=is_running)
        self._held += num_bytes

    def release(self) -> None:
        for release in self._releases:
            release()
        held, of_images = self._held, self._held_of_images
        self._held = self._held_of_images = 0
        if of_images:
            self._images.give(self.client.name, of_images)
        if held:
            self._memory.give(self.client.name, held)
        if held + of_images >= _WORTH_RETURNING_BYTES:
            return_memory()


class RequestMemoryMiddleware:
    """Gives every request a lease, in `scope["state"]["lease"]`, and releases it at the end."""

    def __init__(self, app: ASGIApp, total_bytes: int, image_bytes: int, clients: Clients) -> None:
        self._app, self._clients = app, clients
        self._memory = RequestMemory(total_bytes)
        self._images = RequestMemory(image_bytes, "--image-memory", "the prompt's images")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lease = RequestLease(self._memory, self._clients.of(scope), self._images)
        scope["state"]["lease"] = lease
        try:
            await self._app(scope, receive, send)
        finally:
            lease.release()


def lease_of(request: Request) -> RequestLease:
    lease = request.scope["state"]["lease"]
    if not isinstance(lease, RequestLease):
        raise TypeError("the request has no lease")
    return lease
