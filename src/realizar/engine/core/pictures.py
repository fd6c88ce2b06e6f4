"""`PictureEncoder` makes the embeddings of requests' pictures, on a thread beside the steps."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.errors import EngineDeadError, RealizarError, RequestFailedError
from realizar.request import Picture, PromptEmbeddings, Request

_LOG = logging.getLogger(__name__)
_KEPT_BYTES = 256 << 20  # of embeddings that later turns of a conversation may need again

Encode: TypeAlias = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""The features of a picture, uint8 [height, width, 3]: float32 [squares, features]. Raises RealizarError."""


@dataclass(eq=False, slots=True)
class _Job:
    request: Request
    on_done: Callable[[Request | RealizarError], None]
    is_cancelled: bool = False


class PictureEncoder:
    """Encodes the pictures of one request at a time. Clients take turns, and each one's requests come in order.

    Embeddings that were used last stay, up to a bound, so that a picture that comes again is not encoded again.
    `load` makes what encodes, for the first picture; it may raise RealizarError.
    """

    def __init__(self, load: Callable[[], Encode]) -> None:
        self._load = load
        self._encode: Encode | None = None
        self._kept: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        self._kept_bytes = 0
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait for others before them."""
        with self._news:
            return sum(map(len, self._waiting.values()))

    def embed_later(self, request: Request, on_done: Callable[[Request | RealizarError], None]) -> Callable[[], None]:
        """Call `on_done`, on another thread, with the request that has embeddings in the place of its pictures, or why
        it has none; not once the function that this returns was called. EngineDeadError: the encoder was closed.
        """
        job = _Job(request, on_done)
        client = request.client.name

        def cancel() -> None:
            job.is_cancelled = True
            with self._news:
                jobs = self._waiting.get(client, deque())
                if job in jobs:
                    jobs.remove(job)
                    if not jobs:
                        del self._waiting[client]

        with self._news:
            if self._is_closed:
                raise EngineDeadError("the encoder of images was closed")
            self._waiting.setdefault(client, deque()).append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="realizar-images", daemon=True)
                self._thread.start()
            self._news.notify()
        return cancel

    def close(self) -> None:
        """Wait for the picture that is being encoded, and drop the others and what encodes. Idempotent."""
        with self._news:
            self._is_closed = True
            self._waiting.clear()
            self._news.notify()
        if self._thread is not None:
            self._thread.join()
        self._encode = None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            found = self._outcome(job)
            if found is not None and not job.is_cancelled:
                job.on_done(found)
            del job, found  # which may be hundreds of megabytes, and stay while nothing comes

    def _next(self) -> _Job | None:
        """The next client's first request, when there is one; None once the encoder is closed."""
        with self._news:
            while not self._waiting and not self._is_closed:
                self._news.wait()
            if self._is_closed:
                return None
            client, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # behind all others
            return job

    def _outcome(self, job: _Job) -> Request | RealizarError | None:
        """None where the request, or the encoder, ends meanwhile."""
        found: list[PromptEmbeddings] = []
        waiting: list[bytes] = []
        try:
            for run in job.request.embeddings:
                if job.is_cancelled or self._is_closed:
                    return None
                if run.picture is not None:
                    waiting = list(self._values(run.picture, run.digests))
                found.append(run if run.values else replace(run, values=waiting.pop(0), picture=None))
        except RealizarError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one request's pictures must not cost the others their encoder
            _LOG.exception("a picture could not be encoded")
            return RequestFailedError(f"a picture could not be encoded: {type(error).__name__}: {error}")
        return replace(job.request, embeddings=tuple(found))

    def _values(self, picture: Picture, key: bytes) -> tuple[bytes, ...]:
        """Of each run of a picture; `key` are the digests of the first."""
        found = self._kept.pop(key, None)
        if found is None:
            if self._encode is None:
                self._encode = self._load()
            features = self._encode(np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3))
            if not np.isfinite(features).all():
                raise RequestFailedError("an embedding of a picture is not finite")
            found = tuple(part.tobytes() for part in np.split(features, picture.num_runs))
            self._kept_bytes += sum(map(len, found))
        self._kept[key] = found
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))
        return found
