"""`PictureEncoder` makes the embeddings of requests' pictures, on a thread beside the steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.errors import RealizarError, RequestFailedError
from realizar.request import Picture, PromptEmbeddings, Request

_KEPT_BYTES = 256 << 20  # of embeddings that later turns of a conversation may need again

Embedded: TypeAlias = "Request | RealizarError"


class EncodesPictures(Protocol):
    def encode(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The features of a picture, uint8 [height, width, 3]: float32 [squares, features]. Raises RealizarError."""


class PictureEncoder:
    """An encoder of images that one request at a time uses, first come, first served. Embeddings that were used last
    stay, up to a bound.
    """

    def __init__(self, tower: EncodesPictures) -> None:
        self._tower: EncodesPictures | None = tower
        self._worker = ThreadPoolExecutor(1, "images")
        self._kept: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        self._kept_bytes = 0

    def embed(self, request: Request) -> Request:
        """A request with the embeddings of its pictures in their place. Waits for those before it.

        RealizarError: a picture can't be encoded.
        """
        return self._worker.submit(self._embedded, request, Event()).result()

    def embed_later(self, request: Request, on_done: Callable[[Embedded], None]) -> Callable[[], None]:
        """As `embed`, in the background; `on_done` is called with the result on another thread, unless the callback
        that this returns came first.
        """

        def report(done: Future[Request]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                on_done(done.result())
            elif isinstance(error, RealizarError):
                on_done(error)
            else:
                on_done(RequestFailedError(f"a picture could not be encoded: {type(error).__name__}: {error}"))

        def cancel() -> None:
            ended.set()
            future.cancel()

        ended = Event()
        future = self._worker.submit(self._embedded, request, ended)
        future.add_done_callback(report)
        return cancel

    def close(self) -> None:
        """Wait for the picture that is being encoded, and drop the others and the encoder."""
        self._worker.shutdown(cancel_futures=True)
        self._tower = None

    def _embedded(self, request: Request, ended: Event) -> Request:
        """`embed`, up to the picture before which `ended` is set."""
        found: list[PromptEmbeddings] = []
        waiting: list[bytes] = []
        for run in request.embeddings:
            if ended.is_set():
                raise RequestFailedError("the request ended before its pictures were encoded")
            if run.picture is not None:
                waiting = list(self._values(run.picture, run.digests))
            found.append(run if run.values else replace(run, values=waiting.pop(0), picture=None))
        return replace(request, embeddings=tuple(found))

    def _values(self, picture: Picture, key: bytes) -> tuple[bytes, ...]:
        """Of each run of a picture; `key` are the digests of the first."""
        found = self._kept.get(key)
        if found is None:
            assert self._tower is not None
            pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)
            parts = np.split(self._tower.encode(pixels), picture.num_runs)
            found = self._kept[key] = tuple(part.tobytes() for part in parts)
            self._kept_bytes += sum(map(len, found))
        self._kept.move_to_end(key)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))
        return found
