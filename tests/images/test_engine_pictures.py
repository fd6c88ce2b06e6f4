"""Pictures whose embeddings the engine makes give what embeddings that come with the request do, and fail alone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from images.vision_models import EDGE, TILE, image_of, write_vision_files
from realizar import LLM, AsyncLLM, SamplingParams
from realizar.backends.select import make_tower
from realizar.checkpoint.open import open_checkpoint
from realizar.engine.core.pictures import PictureEncoder
from realizar.engine.process.messages import Add, Command
from realizar.errors import InvalidRequestError, RequestFailedError, StepError
from realizar.images.prepare import patches_of
from realizar.ipc.frames import FrameReader, encode_frame
from realizar.models.registry import find_tower
from realizar.request import Picture, PromptEmbeddings, Request
from waits import HANG_S

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
OPTIONS: dict[str, Any] = {"context_length": 1024, "threads": 1}
PICTURES = (EDGE // TILE) ** 2 + 1  # of a square image: its tiles, and the whole


class Eyes:
    """The encoder of the CPU in the engine: counts pictures, and fails, or waits, where it is told to."""

    def __init__(self, path: Path) -> None:
        found = find_tower(open_checkpoint(path))
        assert found is not None
        self.tower = found[1]
        self._encoder = make_tower(self.tower, found[0], 1)
        self.count = 0
        self.error: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def encode(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.goes_on.wait(HANG_S)
        self.count += 1
        if self.error is not None:
            raise self.error
        return self._encoder.encode(patches_of(self.tower, picture))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_vision_files(tmp_path)


@pytest.fixture
def eyes(path: Path, monkeypatch: pytest.MonkeyPatch) -> Eyes:
    found = Eyes(path)
    monkeypatch.setattr("realizar.engine.loading._load_encoder", lambda *_, **__: PictureEncoder(found))
    return found


def showing(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": Image.fromarray(image_of(size))} for size in sizes]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def test_the_engine_gives_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of one picture and of several; a later turn encodes no picture again."""
    conversations = [showing((28, 28)), showing((333, 100)), [{"role": "user", "content": "Hello"}]]
    with LLM(path, **OPTIONS) as model:
        expected = [each.outputs for each in model.chat(conversations, GREEDY)]
    eyes = Eyes(path)
    monkeypatch.setattr("realizar.engine.loading._load_encoder", lambda *_, **__: PictureEncoder(eyes))
    monkeypatch.setattr("realizar.engine.images.make_tower", None)
    with LLM(path, **OPTIONS) as model:
        assert [each.outputs for each in model.chat(conversations, GREEDY)] == expected
        count = eyes.count
        assert count > PICTURES
        later = [*showing((333, 100)), {"role": "assistant", "content": "A."}, *showing((28, 28))]
        found = model.chat(later, GREEDY)[0]
        assert found.num_cached_tokens > 0
        assert eyes.count == count


def test_a_picture_that_fails_ends_its_request_alone(path: Path, eyes: Eyes) -> None:
    eyes.error = StepError("the features are not finite")
    with LLM(path, **OPTIONS) as model:
        with pytest.raises(StepError, match="not finite"):
            model.chat(showing((28, 28)), GREEDY)
        eyes.error = ValueError("odd")
        with pytest.raises(RequestFailedError, match="a picture could not be encoded: ValueError: odd"):
            model.chat(showing((28, 28)), GREEDY)
        eyes.error = None
        assert model.chat(showing((28, 28)), GREEDY)[0].outputs


def test_text_goes_on_beside_a_picture_and_a_request_that_ends_takes_its_own_along(path: Path, eyes: Eyes) -> None:
    async def run() -> None:
        async with asyncio.timeout(HANG_S), AsyncLLM(path, **OPTIONS) as model:
            eyes.goes_on.clear()
            first = asyncio.create_task(model.chat(showing((28, 28)), GREEDY))
            second = asyncio.create_task(model.chat(showing((20, 20)), GREEDY))
            text = await model.chat([{"role": "user", "content": "Hello"}], GREEDY)
            assert text[0].outputs
            assert not first.done()
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            eyes.goes_on.set()
            assert (await first)[0].outputs
            assert PICTURES <= eyes.count <= PICTURES + 1  # the other's first, where that came first

    asyncio.run(run())


def test_a_request_with_a_picture_passes_between_processes() -> None:
    run = PromptEmbeddings(1, b"", bytes(64), picture=Picture(bytes(12), 2, 2, 1))
    request = Request("a", (1, 2, 3), GREEDY, 1, embeddings=(run,))
    assert request.shows_pictures
    (found,) = FrameReader[Command](Command).feed(encode_frame(Add(request)))
    assert found == Add(request)


def test_an_engine_without_an_encoder_refuses_pictures(path: Path) -> None:
    with LLM(path, **OPTIONS) as model:
        model._reader.engine_encodes = True
        with pytest.raises(InvalidRequestError, match="the engine has no encoder of images"):
            model.chat(showing((28, 28)), GREEDY)
