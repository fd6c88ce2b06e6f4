"""`LLM` and `AsyncLLM` plan conversations by the headers of their images, and encode what fits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from images.vision_kinds import IMAGE, TILE
from images.vision_models import image_of, write_vision_files
from realizar import LLM, AsyncLLM, SamplingParams
from realizar.errors import CheckpointError, ContextLengthError, InvalidRequestError, UnsupportedModelError
from waits import HANG_S

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")

GREEDY = SamplingParams(temperature=0, max_tokens=4)
OPTIONS: dict[str, Any] = {"context_length": 320, "threads": 1}


def showing(count: int) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": Image.fromarray(image_of((28, 28)))}] * count
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_vision_files(tmp_path)


def test_a_prompt_that_is_too_long_is_refused_before_an_image_is_decoded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own nor those of prompts beside it."""

    async def twin() -> None:
        async with asyncio.timeout(HANG_S), AsyncLLM(path, **OPTIONS) as model:
            with pytest.raises(ContextLengthError, match="maximum context length is 320 tokens"):
                await model.chat([showing(1), showing(2)], GREEDY)
            with pytest.raises(ContextLengthError, match="images have"):
                await model.chat_stream(showing(2), GREEDY)

    with LLM(path, **OPTIONS) as model:
        with monkeypatch.context() as blind:
            blind.setattr("realizar.engine.images.pictures_of", None)
            one, two = (model.chat_tokens(showing(count)) for count in (1, 2))
            assert two.count(IMAGE) == 2 * one.count(IMAGE) > 0
            with pytest.raises(ContextLengthError, match=f"images have {len(two)} tokens, so the prompt is too long"):
                model.chat([showing(1), showing(2)], GREEDY)
            with pytest.raises(ContextLengthError, match="images have"):
                model.chat_stream(showing(2), GREEDY)
            asyncio.run(twin())
        assert model.chat(showing(1), GREEDY)[0].prompt_token_ids == tuple(one)


def test_images_are_reduced_for_all_calls_or_for_one(path: Path) -> None:
    def features(model: LLM, **options: Any) -> int:
        counted = model.chat_tokens(showing(1), **options).count(IMAGE)
        assert model.chat(showing(1), GREEDY, **options)[0].prompt_token_ids.count(IMAGE) == counted
        return counted

    with LLM(path, **OPTIONS) as model:
        assert features(model) == 16 * 10
        assert features(model, mm_processor_kwargs={"max_pixels": 5 * TILE**2}) == 16 * 5
        with pytest.raises(InvalidRequestError, match=r"mm_processor_kwargs\.num_crops is not supported"):
            features(model, mm_processor_kwargs={"num_crops": 4})
        with pytest.raises(InvalidRequestError, match=r"mm_processor_kwargs must be an object"):
            features(model, mm_processor_kwargs=[4])
    with LLM(path, **OPTIONS, image_max_tokens=16 * 5) as model:
        assert features(model) == 16 * 5
        assert features(model, mm_processor_kwargs={"max_pixels": 1 << 20}) == 16 * 5
        assert features(model, mm_processor_kwargs={"max_pixels": TILE**2}) == 16
    with pytest.raises(InvalidRequestError, match="image_max_tokens must be at least 16, not 15: idefics3 reads no"):
        LLM(path, **OPTIONS, image_max_tokens=15)


def test_a_pillow_image_may_have_the_colours_of_any_file(path: Path, tmp_path: Path) -> None:
    """Of print too, which PNG files do not have."""
    file = tmp_path / "print.jpeg"
    Image.fromarray(image_of((28, 28))).convert("CMYK").save(file)
    with LLM(path, **OPTIONS) as model, Image.open(file) as opened:
        for image in (opened, opened.convert("F")):
            (message,) = showing(1)
            message["content"][0]["image"] = image
            assert model.chat_tokens([message]) == model.chat_tokens(showing(1))


def test_an_encoder_is_named_or_none_is_wanted(path: Path, tmp_path: Path) -> None:
    """One that was named runs, or the model does not: one of no use that lies beside it costs images alone."""
    tower = path.with_name("mmproj-tiny.gguf")
    elsewhere = tower.rename(tmp_path / "elsewhere.bin")
    with LLM(path, **OPTIONS, mmproj=str(elsewhere)) as model:
        seen = model.chat(showing(1), GREEDY)[0].outputs[0].token_ids
    elsewhere.rename(tower)
    with LLM(path, **OPTIONS) as model:
        assert model.chat(showing(1), GREEDY)[0].outputs[0].token_ids == seen
    blind = path.with_name("mmproj-torn.gguf")
    blind.write_bytes(tower.read_bytes()[:5000])
    for mmproj, error, message in (
        (str(path), UnsupportedModelError, r"tiny\.gguf: no encoder of images, but of architecture 'llama'"),
        (str(blind), CheckpointError, r"mmproj-torn\.gguf"),
        (str(tmp_path / "none.gguf"), CheckpointError, r"none\.gguf"),
        ("", InvalidRequestError, "mmproj must be auto, none, or a file"),
    ):
        with pytest.raises(error, match=message):
            LLM(path, **OPTIONS, mmproj=mmproj)
    blind.rename(tower)
    for options in ({"mmproj": "none"}, {}):
        with (
            LLM(path, **OPTIONS, **options) as model,
            pytest.raises(InvalidRequestError, match="the model reads text only"),
        ):
            model.chat(showing(1), GREEDY)
