"""Hostile images and addresses are answered or refused by name, and harm neither the server nor its other clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")

from fuzz import healthy
from fuzz.check_answers import answer_fault
from fuzz.images import HostileImage, hostile_images
from fuzz.report import Report
from fuzz.server import HEALTHY_KEY, HOSTILE_KEYS, FuzzedServer, fuzzed_server
from images.vision_models import write_vision_files
from waits import HANG_S

KINDS = ("greedy", "sampled")
MOST_PROCESSES = 4
MOST_MB = {"images.decode": 1700.0, "": 400.0}
"""Of memory that a process may have held, by a part of its command."""


def body_of(image: HostileImage, place: int) -> tuple[str, dict[str, Any]]:
    """A request that shows an image, by turns in the dialects that take its address, and streamed or not.

    Ollama's takes the bytes alone.
    """
    text, options = "What is this?", {"model": "tiny", "stream": place % 2 == 1}
    kinds = 4 if image.url.startswith("data:image/") and ";base64," in image.url and "is said" not in image.name else 3
    match place // 2 % kinds:
        case 0:
            part = {"type": "image_url", "image_url": {"url": image.url}}
            content = [part, {"type": "text", "text": text}]
            return "/v1/chat/completions", {
                **options, "messages": [{"role": "user", "content": content}], "max_tokens": 4
            }  # fmt: skip
        case 1:
            part = {"type": "image", "source": {"type": "url", "url": image.url}}
            content = [part, {"type": "text", "text": text}]
            return "/v1/messages", {**options, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        case 2:
            part = {"type": "input_image", "image_url": image.url}
            content = [part, {"type": "input_text", "text": text}]
            return "/v1/responses", {
                **options, "input": [{"role": "user", "content": content}], "max_output_tokens": 16
            }  # fmt: skip
    message = {"role": "user", "content": text, "images": [image.url.partition(",")[2]]}
    return "/api/chat", {**options, "messages": [message], "options": {"num_predict": 4}}


async def ask(client: httpx.AsyncClient, image: HostileImage, place: int, report: Report) -> None:
    path, body = body_of(image, place)
    answer = await client.post(path, json=body)
    said = f"{path}, {image.name}: {answer.status_code} {answer.text[:300]}"
    if fault := answer_fault(path, answer.status_code, answer.headers.get("content-type", ""), answer.content):
        report.fault(f"{said}: {fault}")
    is_read = answer.status_code == 200 and not re.search(r'"error": ?(?!null)', answer.text)
    if is_read != image.is_read:
        report.fault(f"{said}: it is {'read' if is_read else 'refused'}")
    if not is_read and not re.search(r"(messages|input)[.\[]0", answer.text):
        report.fault(f"{said}: the image is not named")
    report.counts["read" if is_read else "refused"] += 1


async def attack(server: FuzzedServer, images: list[HostileImage], report: Report) -> None:
    """Three clients take turns with the images, while the streams of another are read."""
    waiting = list(enumerate(images))

    async def hostile(key: str) -> None:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=HANG_S, headers={"Authorization": f"Bearer {key}"}
        ) as client:
            while waiting:
                place, image = waiting.pop(0)
                await ask(client, image, place, report)

    headers = {"Authorization": f"Bearer {HEALTHY_KEY}"}
    async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S, headers=headers) as client:
        alone = {kind: await healthy.text_of(client, "tiny", kind, report) or "" for kind in KINDS}
        stop = asyncio.Event()
        streams = [
            asyncio.create_task(healthy.repeat(client, "tiny", kind, alone[kind], stop, report)) for kind in KINDS
        ]
        await asyncio.gather(*(hostile(key) for key in HOSTILE_KEYS))
        stop.set()
        await asyncio.gather(*streams)


def processes(pid: int) -> Iterator[tuple[int, str]]:
    """A process and all below it, with their commands."""
    yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text(encoding="ascii").split():
            yield from processes(int(child))


def peak_mb(pid: int) -> float:
    """The most memory that a process has held."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return 0.0 if found is None else int(found[1]) * 1024 / 1e6


def test_hostile_images_cost_their_senders_alone(tmp_path: Path) -> None:
    report = Report()
    hosts = ("--image-host", "localhost", "--image-host", "169.254.169.254")
    with fuzzed_server([str(write_vision_files(tmp_path))], tmp_path, *hosts) as server:
        images = hostile_images(server.port)
        assert len(images) >= 60
        asyncio.run(attack(server, images, report))
        running = list(processes(server.process.pid))
        peaks = {f"{command[:80]} ({pid})": peak_mb(pid) for pid, command in running}
        for name, peak in peaks.items():
            if peak > next(most for part, most in MOST_MB.items() if part in name):
                report.fault(f"{name} held {peak:.0f} MB")
        for line in server.grave_lines():
            report.fault(f"the server's log says: {line}")
    print(report.summary(), peaks)
    assert not report.faults
    assert report.counts["healthy streams"] > 1
    assert 0 < sum("images.decode" in name for name in peaks) <= MOST_PROCESSES
    assert report.counts["read"] == sum(image.is_read for image in images)
