"""Whole models that see, on a GPU: they agree with transformers, and with `batch_invariant` answers have the same bits
whatever is reused.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
pytest.importorskip("transformers", reason="models are made by transformers")
Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from engine.core.test_hybrid_conversations import compare  # noqa: E402
from images.test_seeing_conversations import CONTEXT, SIZES, SeeingChat, embedded, tightened  # noqa: E402
from images.vision_kinds import KINDS  # noqa: E402
from images.vision_models import build_vision_model, encoded, image_of  # noqa: E402
from parity_table.images import measure_images  # noqa: E402
from parity_table.page import IMAGE_PARTS  # noqa: E402
from realizar.backends.base import Capacity  # noqa: E402
from realizar.backends.cuda.device import open_device  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.cuda.tower import CUDATower  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.engine.core.pictures import PictureEncoder, Slices  # noqa: E402
from realizar.engine.images import open_images  # noqa: E402
from realizar.errors import RealizarError  # noqa: E402
from realizar.images.given import GivenImage  # noqa: E402
from realizar.images.prepare import mark_of  # noqa: E402
from realizar.models.registry import build_spec  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.scheduler.pace import Policy  # noqa: E402
from realizar.tokenizer.load import load_tokenizer  # noqa: E402
from resolving import resolved  # noqa: E402
from step_inputs import stepped  # noqa: E402

pytestmark = pytest.mark.gpu


class TightBackend(CUDABackend):
    """Has blocks for one request of the whole context, and few snapshots."""

    def capacity(self) -> Capacity:
        return tightened(super().capacity())


class SlicedChat(SeeingChat):
    """Its pictures are encoded between the steps of what else runs."""

    def _with_embeddings(self, request: Request) -> Request:
        if not request.shows_pictures:
            return request
        done: SimpleQueue[Request | RealizarError] = SimpleQueue()
        self.core.embed_later(request, done.put)
        while done.empty():
            if self.core.has_work:
                for output in stepped(self.core):
                    self._take_in(output)
            else:
                time.sleep(1e-4)
        found = done.get()
        assert isinstance(found, Request), found
        return found


def make_core(path: Path, kind: type[CUDABackend], encoder: CUDATower, **options: Any) -> EngineCore:
    checkpoint = open_checkpoint(path)
    spec = build_spec(checkpoint)
    config = EngineConfig(
        context_length=CONTEXT, kv_cache_bytes=64 << 20, host_snapshot_bytes=0, batch_invariant=True, **options
    )
    settled = resolved(spec, checkpoint, config, "cuda")
    backend, slices = kind(device=open_device()), Slices(encoder)
    backend.load(spec, checkpoint, settled)
    pictures = PictureEncoder(lambda: slices.encode, slices)
    return EngineCore(backend, spec, settled, policy=Policy(stretch=math.inf), pictures=pictures)


@pytest.mark.parametrize(("kind", "drafts"), [("smolvlm", 0), ("gemma3", 3), ("qwen3_vl", 3), ("qwen3_5", 0)])
def test_random_conversations(kind: str, drafts: int, tmp_path: Path) -> None:
    """As those of `test_seeing_conversations` on the CPU, with pictures in slices between the steps."""
    path = build_vision_model(kind, tmp_path).path
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint)
    reader = open_images(checkpoint, tokenizer, EngineConfig(image_max_tokens=32))
    assert reader is not None
    (mark,) = tokenizer.encode(mark_of(reader.tower), add_special=False)
    images = [GivenImage("image", encoded(Image.fromarray(image_of(size)))).open() for size in SIZES]
    encoder = CUDATower(reader.tower, checkpoint, torch.device("cuda", 0))
    core = make_core(path, TightBackend, encoder, max_running=8, max_step_tokens=48, speculative_tokens=drafts)
    chat = SlicedChat(11 + drafts, core, reader, mark, images)
    try:
        arrivals = 60
        chat.run(arrivals)
        while not core.scheduler.counts.num_preemptions and arrivals < 300:  # as a picture is soon encoded here
            arrivals += 60
            chat.run(arrivals)
        counts = core.scheduler.counts
    finally:
        core.close()
    assert len(chat.ended) + chat.lost == arrivals
    assert sum(request.shows_pictures for request, _ in chat.ended) > 20
    assert counts.num_preemptions > 0
    assert counts.prefix_cache_hits > counts.prefix_cache_queries / 4
    assert counts.accepted_tokens > 20 or not drafts
    chat.ended = [(embedded(request, encoder.encode), outputs) for request, outputs in chat.ended]
    fresh = make_core(path, CUDABackend, encoder, max_running=1, prefix_cache=False)
    try:
        compare(chat, fresh)
    finally:
        fresh.close()


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_prompts_agree_with_transformers(kind: str) -> None:
    """As the table of parity has them: a feature, or a token's log-probability, that is too far is an error there."""
    assert measure_images(kind, "cuda").keys() == set(IMAGE_PARTS)
