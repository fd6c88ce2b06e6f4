"""`PictureEncoder` makes the embeddings of requests' pictures, beside the steps or in slices between them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.errors import (
    CapacityError,
    DeviceLostError,
    EngineDeadError,
    RealizarError,
    RequestFailedError,
    StepError,
    StepMemoryError,
)
from realizar.request import Picture, PromptEmbeddings, Request, Values

_LOG = logging.getLogger(__name__)
KEPT_BYTES = 256 << 20
"""Of embeddings, in the host's memory, that later turns of a conversation may need again."""

Encode: TypeAlias = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""The features of a picture, uint8 [height, width, 3]: float32 [squares, features], finite. Raises RealizarError."""


class Sliced(Protocol):
    """An encoder on the device of the steps, one picture at a time."""

    def begin(self, picture: NDArray[np.uint8]) -> None:
        """Take a picture as of `Encode`; on any thread."""

    def go_on(self, seconds: float) -> bool:
        """Launch what takes about so long, or all that is left, between two steps; True if some is left."""

    def features(self) -> NDArray[np.float32]:
        """Wait for those of the picture of which nothing is left to be launched; on any thread."""


class Slices:
    """An encoder of whose work the engine's loop launches slices, so that streams beside it keep their pace.

    `wake` is called, on another thread, when there is something to launch.
    """

    def __init__(self, tower: Sliced) -> None:
        self._tower: Sliced | None = tower
        self._launched = threading.Event()
        self._error: Exception | None = None
        self.has_work = False
        self.wake: Callable[[], None] = lambda: None

    def encode(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """As `Encode`, by the thread of the pictures. EngineDeadError: the encoder was closed."""
        self._launched.clear()
        if (tower := self._tower) is None:
            raise EngineDeadError("the encoder of images was closed")
        tower.begin(picture)
        self.has_work = True
        self.wake()
        self._launched.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return tower.features()

    def go_on(self, seconds: float) -> None:
        """As `Sliced.go_on`. What is raised ends the picture; DeviceLostError is raised here, too."""
        try:
            if self._tower is not None and self._tower.go_on(seconds):
                return
        except Exception as error:
            self._end(error)
            if isinstance(error, DeviceLostError):
                raise
        else:
            self._end(None)

    def close(self) -> None:
        """Launch nothing more, and drop the encoder."""
        self._tower = None
        self._end(EngineDeadError("the encoder of images was closed"))

    def _end(self, error: Exception | None) -> None:
        self._error, self.has_work = error, False
        self._launched.set()


@dataclass(eq=False, slots=True)
class _Job:
    request: Request
    on_done: Callable[[Request | RealizarError], None]
    is_cancelled: bool = False


class PictureEncoder:
    """Encodes the pictures of one request at a time. Clients take turns, and each one's requests come in order.

    Embeddings that were used last stay, up to a bound, so that a picture that comes again is not encoded again.
    `load` makes what encodes, for the first picture; it may raise RealizarError. With `slices` it is `slices.encode`.

    Attributes:
        client: the name of the one whose request it is, or was last.
    """

    def __init__(self, load: Callable[[], Encode], slices: Slices | None = None) -> None:
        self._load, self.slices, self.client = load, slices, ""
        self._encode: Encode | None = None
        self._kept: OrderedDict[bytes, tuple[Values, ...]] = OrderedDict()
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
        """Wait for the picture that is being encoded, unless it is so in slices, and drop the others and what encodes.

        Idempotent.
        """
        with self._news:
            self._is_closed = True
            self._waiting.clear()
            self._news.notify()
        if self.slices is not None:
            self.slices.close()
        if self._thread is not None:
            self._thread.join()
        self._encode = None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self.client = job.request.client.name
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
        waiting: list[Values] = []
        try:
            for run in job.request.embeddings:
                if job.is_cancelled or self._is_closed:
                    return None
                if run.picture is not None:
                    waiting = list(self._values(run.picture, run.digests))
                found.append(run if run.values else replace(run, values=waiting.pop(0), picture=None))
        except StepError as error:
            return RequestFailedError(f"a picture could not be encoded: {error}")
        except CapacityError as error:
            return StepMemoryError(f"a picture could not be encoded: {error}")
        except RealizarError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one request's pictures must not cost the others their encoder
            _LOG.exception("a picture could not be encoded")
            return RequestFailedError(f"a picture could not be encoded: {type(error).__name__}: {error}")
        return replace(job.request, embeddings=tuple(found))

    def _values(self, picture: Picture, key: bytes) -> tuple[Values, ...]:
        """Of each run of a picture; `key` are the digests of the first."""
        found = self._kept.pop(key, None)
        if found is None:
            if self._encode is None:
                self._encode = self._load()
            features = self._encode(np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3))
            # Views: to copy what may be 64 MiB would keep the interpreter, and with it the steps, for long.
            found = tuple(part.data.cast("B") for part in np.split(features, picture.num_runs))
            self._kept_bytes += sum(map(len, found))
        self._kept[key] = found
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))
        return found
