"""How far a model that sees is from transformers: features of its tower, and prompts with images."""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from architectures import DeviceKind
from images.tower_files import write_tower_file
from images.vision_models import SIZES, build_vision_model
from images.vision_prompts import CONVERSATIONS, as_image, expected, features, logprobs, pictures
from parity_table.page import IMAGE_PARTS
from realizar.backends.cpu.tower import CPUTower
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.engine.llm import LLM
from realizar.models.registry import build_tower
from realizar.models.tower import Tower
from realizar.sampling_params import SamplingParams

_FARTHEST = 1e-4  # of a feature or a log-probability
_SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def measure_images(kind: str, device: DeviceKind) -> dict[str, float]:
    """Errors of a model of `vision_kinds` on a device, by `IMAGE_PARTS`: the norm of the difference over the norm.

    AssertionError: a feature, or the log-probability of a token, is too far.
    """
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        vision = build_vision_model(kind, Path(folder) / kind)
        checkpoint, file = open_checkpoint(vision.path), Path(folder) / "mmproj.gguf"
        write_tower_file(checkpoint, file)
        tower = build_tower(checkpoint)
        assert tower is not None
        wanted = [vision.features(vision.prepared([as_image(size)])) for size in SIZES]
        for holder in (checkpoint, open_checkpoint(file)):
            built = build_tower(holder)
            assert built is not None
            alike = replace(built, preparation=tower.preparation)  # of which a file may say less
            found.append(_error(_features(alike, holder, device), np.concatenate(wanted)))
        with LLM(vision.path, threads=2, device=device, kv_cache_bytes=64 << 20, device_check=False) as llm:
            for messages in CONVERSATIONS.values():
                (scored,) = llm.chat(messages, _SCORED)
                found.append(_error(np.array(logprobs(scored), np.float32), expected(vision, messages)[1]))
    return dict(zip(IMAGE_PARTS, found, strict=True))


def _features(tower: Tower, holder: Checkpoint, device: DeviceKind) -> NDArray[np.float32]:
    """Of all images, as the encoder on a device makes them."""
    if device == "cpu":
        encoder = CPUTower(tower, holder, threads=2)
        return np.concatenate([features(encoder, tower, size) for size in SIZES])
    torch = importlib.import_module("torch")  # with CUDA, and Triton
    on_gpu = importlib.import_module("realizar.backends.cuda.tower").CUDATower(tower, holder, torch.device("cuda", 0))
    return np.concatenate([on_gpu.encode(each) for size in SIZES for each in pictures(tower, size)])


def _error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    farthest = np.abs(found - wanted).max()
    if not farthest <= _FARTHEST:
        raise AssertionError(f"{farthest:.2e} from transformers")
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
