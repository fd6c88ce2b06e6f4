"""What is compared of a model that sees: features of images, and log-probabilities of prompts with some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from images.vision_kinds import IMAGE
from images.vision_models import VisionModel, image_of
from realizar.backends.cpu.tower import CPUTower
from realizar.engine.frontend.outputs import RequestOutput
from realizar.images.decode import cut_up
from realizar.images.prepare import cut_of, patches_of
from realizar.models.tower import Tower


def as_image(size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.fromarray(image_of(size))


def pictures(tower: Tower, size: tuple[int, int]) -> list[NDArray[np.uint8]]:
    """The pixels of each picture of an image, as a tower's preparation cuts it up."""
    return [np.asarray(each) for each in cut_up(as_image(size), cut_of(tower, *size))]


def patches(tower: Tower, size: tuple[int, int]) -> list[NDArray[np.float32]]:
    """The patches of each picture of an image."""
    return [patches_of(tower, each) for each in pictures(tower, size)]


def conversation(texts: Sequence[str], sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """A text, an image, a text, and so on; with more than one image the last is in a message of its own."""
    parts: list[dict[str, Any]] = []
    for text, size in zip(texts, sizes, strict=True):
        parts += [{"type": "text", "text": text}, {"type": "image", "image": as_image(size)}]
    messages = [{"role": "user", "content": parts if len(sizes) == 1 else parts[:-2]}]
    if len(sizes) > 1:
        messages.append({"role": "assistant", "content": "I see."})
        messages.append({"role": "user", "content": parts[-2:]})
    return messages


CONVERSATIONS = {
    "one image": conversation(["What is this?"], [(333, 777)]),
    "three images": conversation(["A", "B and C", "and this?"], [(28, 28), (2000, 300), (1, 1)]),
}


def expected(vision: VisionModel, messages: list[dict[str, Any]]) -> tuple[list[int], NDArray[np.float32]]:
    """The ids of a prompt, and transformers' log-probabilities of each after those before it, from the second on."""
    import torch

    images = [part["image"] for m in messages if isinstance(m["content"], list) for part in m["content"][1::2]]
    prepared = vision.prepared(images)
    text = vision.tokenizer.apply_chat_template(
        messages, chat_template=vision.template, add_generation_prompt=True, tokenize=False
    )
    ids = vision.tokenizer(vision.text(text, prepared), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = vision.model(**vision.inputs(ids, prepared)).logits[0]
    ids[ids == IMAGE] = vision.feature
    chosen = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])
    return ids[0].tolist(), chosen[:, 0].numpy()


def features(encoder: CPUTower, tower: Tower, size: tuple[int, int]) -> NDArray[np.float32]:
    """Of all pictures of an image, as a tower prepares them: float32 [tokens, features]."""
    return np.concatenate([encoder.encode(each) for each in patches(tower, size)])


def logprobs(found: RequestOutput) -> list[float]:
    """Of a prompt's tokens, from the second on."""
    assert found.prompt_logprobs is not None
    return [each.logprob for each in found.prompt_logprobs if each is not None]
