"""The engine encodes pictures beside its steps, each once; one that fails ends its request alone."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from images.vision_kinds import EDGE, TILE
from images.vision_models import image_of, write_vision_files
from realizar import LLM, AsyncLLM, SamplingParams
from realizar.backends.devices import THE_CPU
from realizar.backends.select import make_tower
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.pictures import PictureEncoder, Slices
from realizar.engine.loading import load_core
from realizar.engine.process.messages import Add, Command
from realizar.errors import (
    DeviceLostError,
    EngineDeadError,
    InvalidRequestError,
    RealizarError,
    RequestFailedError,
    StepError,
)
from realizar.images.prepare import patches_of
from realizar.ipc.frames import FrameReader, encode_frame
from realizar.kv_cache.block_files import BlockFiles
from realizar.models.tower import Tower
from realizar.models.towers.find import find_tower
from realizar.request import Client, Picture, PromptEmbeddings, Request
from waits import HANG_S, wait_until

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
OPTIONS: dict[str, Any] = {"context_length": 1024, "threads": 1, "device": "cpu"}
PICTURES = (EDGE // TILE) ** 2 + 1  # of a square image: its tiles, and the whole


class Eyes:
    """The CPU's encoder: counts pictures, and fails, or waits, where it is told to."""

    size_bytes = 0

    def __init__(self) -> None:
        self.num_loads = self.count = 0
        self.error: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def load(self, tower: Tower, checkpoint: Checkpoint, threads: int | None) -> Eyes:
        self.num_loads += 1
        self._encoder = make_tower(tower, checkpoint, threads)
        return self

    def encode(self, patches: NDArray[np.float32]) -> NDArray[np.float32]:
        self.goes_on.wait(HANG_S)
        self.count += 1
        if self.error is not None:
            raise self.error
        return self._encoder.encode(patches)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_vision_files(tmp_path)


@pytest.fixture
def eyes(monkeypatch: pytest.MonkeyPatch) -> Eyes:
    found = Eyes()
    monkeypatch.setattr("realizar.engine.loading.make_tower", found.load)
    return found


def showing(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": Image.fromarray(image_of(size))} for size in sizes]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def test_processes_that_compute_a_model_together_see_what_one_sees(path: Path) -> None:
    found, first = [], SamplingParams(temperature=0, max_tokens=1, logprobs=1)  # later tokens follow from it
    for ranks in (1, 2):
        with LLM(str(path), **{**OPTIONS, "threads": 2, "tensor_parallel": ranks}) as llm:
            answers = [each.outputs[0] for each in llm.chat([showing((90, 60)), showing((64, 64), (90, 60))], first)]
        found.append([entry.logprob for answer in answers for entry in answer.logprobs or ()])
    assert len(found[0]) == 2
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_devices_with_some_layers_each_see_what_one_sees(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.backends.spans.resolve.choose_device", lambda _name: THE_CPU)
    found, sampling = [], SamplingParams(temperature=0, max_tokens=6, logprobs=1)
    for places in ({}, {"device": "auto", "layers_on": "cuda=1,cpu=rest"}):
        with LLM(str(path), **{**OPTIONS, **places}) as llm:
            found.append(
                [each.outputs[0] for each in llm.chat([showing((90, 60)), showing((64, 64), (90, 60))], sampling)]
            )
    assert found[0] == found[1]


def test_a_picture_that_comes_again_is_not_encoded_again(path: Path, eyes: Eyes) -> None:
    """In a later turn, whatever the prefix cache has; and a model that sees no image loads no encoder."""
    with LLM(path, **OPTIONS) as model:
        model.chat([{"role": "user", "content": "Hello"}], GREEDY)
        assert eyes.num_loads == 0
        first = model.chat([showing((28, 28)), showing((333, 100))], GREEDY)
        count = eyes.count
        assert (eyes.num_loads, count > PICTURES) == (1, True)
        later = [*showing((333, 100)), {"role": "assistant", "content": "A."}, *showing((28, 28))]
        assert model.chat(later, GREEDY)[0].num_cached_tokens > 0
        assert model.chat(showing((28, 28)), GREEDY)[0].outputs == first[0].outputs
        assert eyes.count == count


def test_a_picture_that_fails_ends_its_request_alone(path: Path, eyes: Eyes) -> None:
    eyes.error = StepError("a kernel failed")
    with LLM(path, **OPTIONS) as model:
        with pytest.raises(RequestFailedError, match="a picture could not be encoded: a kernel failed"):
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


class InSlices:
    """The CPU's encoder as one on the steps' device, of whose work some slices are launched between steps."""

    slices, fails = 5, False

    def __init__(self, tower: Tower, checkpoint: Checkpoint, *_: object) -> None:
        self.tower, self._encoder, self.size_bytes = tower, make_tower(tower, checkpoint, 1), 0
        self.left = 0
        self.budgets: list[float] = []

    def begin(self, picture: NDArray[np.uint8]) -> None:
        self.left, self.patches = self.slices, patches_of(self.tower, picture)

    def go_on(self, seconds: float) -> bool:
        if self.fails:
            raise StepError("a kernel failed")
        self.budgets.append(seconds)
        self.left = 0 if math.isinf(seconds) else self.left - 1
        return self.left > 0

    def features(self) -> NDArray[np.float32]:
        assert self.left == 0
        return self._encoder.encode(self.patches)


def test_an_encoder_on_the_steps_device_encodes_between_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without streams all at once; beside one in slices, which take half of a step's time."""
    made: list[InSlices] = []

    def make(*given: Any) -> InSlices:
        made.append(InSlices(*given))
        return made[-1]

    async def run() -> None:
        async with asyncio.timeout(HANG_S), AsyncLLM(path, **OPTIONS) as model:
            alone = (await model.chat(showing((28, 28)), GREEDY))[0].outputs[0].token_ids
            (eyes,) = made
            assert eyes.budgets == [math.inf] * len(eyes.budgets) != []
            stream = asyncio.create_task(
                model.chat([{"role": "user", "content": "Hello"}], replace(GREEDY, max_tokens=600, ignore_eos=True))
            )
            eyes.budgets.clear()
            while not any(0 < each < math.inf for each in eyes.budgets):
                assert not stream.done()
                await model.chat(showing((90, 60)), GREEDY)
            eyes.fails = True
            with pytest.raises(RequestFailedError, match="a kernel failed"):
                await model.chat(showing((50, 60)), GREEDY)
            eyes.fails = False
            await stream
            assert (await model.chat(showing((28, 28)), GREEDY))[0].outputs[0].token_ids == alone

    monkeypatch.setattr("realizar.engine.loading.tower_on_gpu", lambda checkpoint, config, _: find_tower(checkpoint))
    monkeypatch.setattr("realizar.engine.loading.make_tower_on_gpu", make)
    asyncio.run(run())


def test_a_picture_wakes_an_engine_in_the_callers_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else runs, an encoder on the steps' device is what there is to do."""
    with LLM(path, **OPTIONS) as model:
        wanted = model.chat(showing((28, 28)), GREEDY)[0].outputs
    monkeypatch.setattr("realizar.engine.loading.tower_on_gpu", lambda checkpoint, config, _: find_tower(checkpoint))
    monkeypatch.setattr("realizar.engine.loading.make_tower_on_gpu", InSlices)
    with LLM(path, **OPTIONS) as model:
        assert model.chat(showing((28, 28)), GREEDY)[0].outputs == wanted


def test_other_weights_of_an_encoder_find_none_of_the_files_of_a_prefix_cache(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of tokens are those of pixels, so that files must be of the encoder too."""
    names = []

    def noted(folder: Path, name: str, limit_bytes: int) -> BlockFiles:
        names.append(name)
        return BlockFiles(folder, name, limit_bytes)

    monkeypatch.setattr("realizar.engine.loading.BlockFiles", noted)
    (tmp_path / "other").mkdir()
    tower = tmp_path / "mmproj-tiny.gguf"
    for content in (tower, tower, write_vision_files(tmp_path / "other", seed=4).with_name(tower.name)):
        load_core(
            open_checkpoint(path), EngineConfig(cache_dir=str(tmp_path / "cache"), mmproj=str(content), **OPTIONS)
        ).close()
    assert names[0] == names[1] != names[2]


def request_of(name: str, *pixels: int, client: str = "") -> Request:
    """With a picture of a pixel for each of the given values."""
    runs = tuple(
        PromptEmbeddings(place, b"", bytes([value]) * 32, picture=Picture(bytes([value] * 3), 1, 1, 1))
        for place, value in enumerate(pixels)
    )
    return Request(name, (1,) * 8, GREEDY, 1, embeddings=runs, client=Client(client))


class Encoding:
    """An encoder whose features are the pixel's value, of which each picture waits until it is let go on; 255 fails."""

    def __init__(self) -> None:
        self.begun, self.let = SimpleQueue[int](), SimpleQueue[None]()
        self.encoder = PictureEncoder(lambda: self.encode)
        self.done = SimpleQueue[Request | RealizarError]()

    def encode(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.begun.put(int(picture[0, 0, 0]))
        self.let.get(timeout=HANG_S)
        if picture[0, 0, 0] == 255:
            raise StepError("a kernel failed")
        return picture[0, :, :1].astype(np.float32)


def test_clients_take_turns() -> None:
    """Pictures that wait go with their request; what comes again is there, and one that fails ends its request."""
    each = Encoding()
    later = each.encoder.embed_later
    later(request_of("a", 1, client="A"), each.done.put)
    assert each.begun.get(timeout=HANG_S) == 1
    later(request_of("b", 2, 1, client="A"), each.done.put)
    cancel = later(request_of("c", 3, client="A"), each.done.put)
    later(request_of("d", 4, 255, client="B"), each.done.put)
    later(request_of("e", 5, client="A"), each.done.put)
    cancel()
    for _ in range(5):
        each.let.put(None)
    found = [each.done.get(timeout=HANG_S) for _ in range(4)]
    assert [each.begun.get(timeout=HANG_S) for _ in range(4)] == [2, 4, 255, 5]
    assert repr(found[2]) == "RequestFailedError('a picture could not be encoded: a kernel failed')"
    made = [each for each in found if isinstance(each, Request)]
    assert [each.request_id for each in made] == ["a", "b", "e"]
    assert [bytes(run.values) for run in made[1].embeddings] == [np.float32(value).tobytes() for value in (2, 1)]
    assert not any(each.shows_pictures for each in made)
    each.encoder.close()


class Sliced:
    """An encoder in two slices, whose part of a name raises what is given for it."""

    def __init__(self, raises: dict[str, RealizarError]) -> None:
        self._raises, self._left = raises, 0

    def _do(self, part: str) -> None:
        if part in self._raises:
            raise self._raises[part]

    def begin(self, picture: NDArray[np.uint8]) -> None:
        self._left = 2
        self._do("begin")

    def go_on(self, seconds: float) -> bool:
        self._do("go_on")
        self._left -= 1
        return self._left > 0

    def features(self) -> NDArray[np.float32]:
        self._do("features")
        return np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("part", "error", "ends_engine"),
    [
        ("", None, False),
        ("begin", StepError("a kernel failed"), False),
        ("go_on", StepError("a kernel failed"), False),
        ("go_on", DeviceLostError("the device is gone"), True),
        ("features", StepError("not finite"), False),
        ("close", EngineDeadError("the encoder of images was closed"), False),
    ],
)
def test_a_picture_in_slices_ends_with_what_any_of_them_raises(
    part: str, error: RealizarError | None, ends_engine: bool
) -> None:
    """What the device is lost by ends the engine's loop, too; nothing is left to be launched after any."""
    slices, wakes = Slices(Sliced({} if error is None else {part: error})), SimpleQueue[None]()
    slices.wake = lambda: wakes.put(None)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(slices.encode, np.zeros((1, 1, 3), np.uint8))
        if part != "begin":
            wakes.get(timeout=HANG_S)
        with pytest.raises(DeviceLostError) if ends_engine else nullcontext():
            for _ in range(2 if slices.has_work else 0):
                slices.go_on(0.001)
                if part == "close":
                    slices.close()
        if error is None:
            assert found.result(HANG_S) == 1.0
        else:
            assert str(found.exception(HANG_S)) == str(error)
    assert not slices.has_work


def test_an_encoder_that_is_closed_ends_after_a_picture_and_takes_no_more() -> None:
    each = Encoding()
    each.encoder.embed_later(request_of("a", 1, 2), each.done.put)
    each.encoder.embed_later(request_of("b", 3), each.done.put)
    assert each.begun.get(timeout=HANG_S) == 1
    closing = threading.Thread(target=each.encoder.close)
    closing.start()
    wait_until(lambda: each.encoder._is_closed)
    each.let.put(None)
    closing.join(HANG_S)
    assert each.done.empty()
    assert each.begun.empty()
    with pytest.raises(EngineDeadError, match="the encoder of images was closed"):
        each.encoder.embed_later(request_of("c", 4), each.done.put)


def test_a_request_with_a_picture_passes_between_processes() -> None:
    request = request_of("a", 1, 2)
    assert request.shows_pictures
    (found,) = FrameReader[Command](Command).feed(encode_frame(Add(request)))
    assert found == Add(request)


def test_an_engine_without_an_encoder_refuses_pictures(path: Path) -> None:
    core = load_core(open_checkpoint(path), EngineConfig(mmproj="none", **OPTIONS))
    with pytest.raises(InvalidRequestError, match="the engine has no encoder of images"):
        core.embed_later(request_of("a", 1), print)
    core.close()
