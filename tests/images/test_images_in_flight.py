"""A server of two API processes with 32 images in flight, and streams of text beside them."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.process.served import serving
from images.vision_models import encoded, image_of, write_vision_files
from waits import HANG_S

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")

SIZES = ((28, 28), (60, 20), (8, 8), (90, 90), (20, 60), (50, 50), (200, 96), (96, 200))
QUESTIONS = ("What is this?", "Where?", "And why?", "Who was here?")
OPTIONS = (
    "--device",
    "cpu",
    "--threads",
    "1",
    "--context-length",
    "1024",
    "--max-running",
    "8",
    "--api-processes",
    "2",
)


def bodies() -> list[dict[str, Any]]:
    """Of 32 requests: each of eight images with each of four questions."""
    found = []
    for size in SIZES:
        data = base64.b64encode(encoded(Image.fromarray(image_of(size)))).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        found += [body([image, {"type": "text", "text": question}]) for question in QUESTIONS]
    return found


def body(content: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": asked, "max_tokens": 12, "temperature": 0, "stream": True}


async def text_of(client: httpx.AsyncClient, asked: dict[str, Any]) -> str:
    """Of a stream that came to its end."""
    text, finish = "", None
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                choice = chunk["choices"][0]
                text, finish = text + (choice["delta"].get("content") or ""), finish or choice["finish_reason"]
    assert finish in ("length", "stop")
    return text


async def ask(url: str) -> None:
    plain = [body(f"Tell me of {place}.") for place in ("Rome", "Ulm", "Lima", "Oslo")]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as client:
        shown = asyncio.gather(*(text_of(client, each) for each in bodies()))
        streams: list[list[str]] = [await asyncio.gather(*(text_of(client, each) for each in plain))]
        while not shown.done():
            streams.append(await asyncio.gather(*(text_of(client, each) for each in plain)))
        found = await shown
        assert [await text_of(client, each) for each in bodies()] == found
        alone = [await text_of(client, each) for each in plain]
        assert all(each == alone for each in streams)
    assert len(set(found)) > len(SIZES)


def test_images_in_flight_and_texts_beside_them_say_what_they_say_alone(tmp_path: Path) -> None:
    """Nothing is lost, and one encoder is loaded, in the engine's process."""
    with serving(write_vision_files(tmp_path), *OPTIONS) as served:
        asyncio.run(ask(served.wait_ready()))
    assert sum("loaded the encoder of images" in line for line in served.lines) == 1
    assert not any("Traceback" in line for line in served.lines)
