"""Random conversations with images on the CPU: whatever is reused, answers have the bits of a fresh computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.conversations import END_OF_MESSAGE, FIRST_IMAGE, Chat, Conversation
from engine.core.test_hybrid_conversations import compare
from images.vision_models import build_vision_model, encoded, image_of
from realizar.backends.base import Capacity
from realizar.backends.cpu.runner import CPUBackend
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.pictures import Encode, PictureEncoder
from realizar.engine.images import ImageReader, open_images
from realizar.engine.loading import _load_encoder
from realizar.images.given import EncodedImage, GivenImage
from realizar.images.prepare import mark_of
from realizar.models.registry import build_spec
from realizar.request import PromptEmbeddings, Request
from realizar.scheduler.pace import Policy
from realizar.tokenizer.load import load_tokenizer
from resolving import resolved
from wider import diagonal

pytest.importorskip("torch", reason="models are made by transformers, which needs torch")
pytest.importorskip("transformers", reason="models are made by transformers")
Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")

SIZES = ((28, 28), (60, 20), (8, 8), (90, 90), (20, 60))
CONTEXT = 768


def tightened(found: Capacity) -> Capacity:
    most = CONTEXT // found.block_size + 1
    return replace(
        found,
        num_blocks=tuple(min(count, most) for count in found.num_blocks),
        num_snapshots=min(found.num_snapshots, 12),
    )


class TightBackend(CPUBackend):
    """Has blocks for one request of the whole context, and few snapshots."""

    def capacity(self) -> Capacity:
        return tightened(super().capacity())


def make_core(
    path: Path, backend: CPUBackend, reader: ImageReader, *, steps_in_flight: int = 1, **options: int
) -> EngineCore:
    checkpoint = open_checkpoint(path)
    spec = build_spec(checkpoint)
    config = EngineConfig(
        threads=1,
        context_length=CONTEXT,
        kv_cache_bytes=64 << 20,
        host_snapshot_bytes=0,
        **options,  # type: ignore[arg-type]
    )
    settled = replace(resolved(spec, checkpoint, config), steps_in_flight=steps_in_flight)
    backend.load(spec, checkpoint, settled)
    pictures = PictureEncoder(partial(_load_encoder, checkpoint, reader.tower, 1))
    return EngineCore(backend, spec, settled, policy=Policy(stretch=math.inf), pictures=pictures)


class SeeingChat(Chat):
    """Users who show images: what stands for one in a message becomes the image's tokens and pictures."""

    def __init__(
        self, seed: int, core: EngineCore, reader: ImageReader, mark: int, images: Sequence[EncodedImage]
    ) -> None:
        super().__init__(seed, core, scale=3, few_ids=True, num_images=len(images))
        self._reader, self._mark, self._images = reader, mark, images

    def request(self, talk: Conversation) -> Request:
        plain = super().request(talk)
        ids = plain.prompt_token_ids
        shown = [self._images[each - FIRST_IMAGE] for each in ids if each >= FIRST_IMAGE]
        marked = [self._mark if each >= FIRST_IMAGE else each for each in ids]
        expanded, starts, positions = self._reader.expand(marked, shown)
        placed = [self._reader.prepare(*each) for each in zip(shown, starts, strict=True)]
        marks = tuple(place + 1 for place, each in enumerate(expanded) if each == END_OF_MESSAGE)
        return replace(
            plain, prompt_token_ids=tuple(expanded), embeddings=self._reader.pictures(placed), rope_positions=positions,
            prompt_marks=marks if plain.prompt_marks else (),
        )  # fmt: skip


def embedded(request: Request, encode: Encode) -> Request:
    """The request with embeddings in place of pictures, each made anew."""
    made = list[PromptEmbeddings]()
    parts: list[Any] = []
    for run in request.embeddings:
        if run.picture is not None:
            shape = run.picture.height, run.picture.width, 3
            features = encode(np.frombuffer(run.picture.pixels, np.uint8).reshape(shape))
            parts = np.split(features, run.picture.num_runs)
        made.append(replace(run, values=parts.pop(0).tobytes(), picture=None))
    return replace(request, embeddings=tuple(made))


@pytest.mark.parametrize(
    ("kind", "pressed"), diagonal(("smolvlm", "gemma3", "qwen3_vl", "qwen3_5"), ((0, 2), (3, 1), (0, 1), (3, 2)))
)
def test_random_conversations(kind: str, pressed: tuple[int, int], tmp_path: Path) -> None:
    """Several images, repeated ones, edits, branches, tenants, several choices, chunks, preemption, aborts, drafts."""
    path = build_vision_model(kind, tmp_path).path
    checkpoint, (drafts, steps_in_flight) = open_checkpoint(path), pressed
    tokenizer = load_tokenizer(checkpoint)
    reader = open_images(checkpoint, tokenizer, EngineConfig(image_max_tokens=32))
    assert reader is not None
    (mark,) = tokenizer.encode(mark_of(reader.tower), add_special=False)
    images = [GivenImage("image", encoded(Image.fromarray(image_of(size)))).open() for size in SIZES]
    core = make_core(
        path, TightBackend(), reader, max_running=8, max_step_tokens=48, speculative_tokens=drafts,
        steps_in_flight=steps_in_flight,
    )  # fmt: skip
    fresh = make_core(path, CPUBackend(), reader, max_running=1, prefix_cache=False)
    try:
        chat = SeeingChat(11 + drafts, core, reader, mark, images)
        chat.run(60)
        assert len(chat.ended) + chat.lost == 60
        assert sum(request.shows_pictures for request, _ in chat.ended) > 20
        encode = _load_encoder(checkpoint, reader.tower, 1)
        chat.ended = [(embedded(request, encode), outputs) for request, outputs in chat.ended]
        compare(chat, fresh)
        counts = core.scheduler.counts
        assert counts.num_preemptions > 0
        assert counts.prefix_cache_hits > counts.prefix_cache_queries / 4
        assert counts.accepted_tokens > 20 or not drafts
    finally:
        core.close()
        fresh.close()
