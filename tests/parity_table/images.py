"""How far a model that sees is from transformers: features of its tower, and prompts with images."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from images.tower_files import write_tower_file
from images.vision_models import SIZES, build_vision_model
from images.vision_prompts import CONVERSATIONS, as_image, expected, features, logprobs
from parity_table.page import IMAGE_PARTS
from realizar.backends.cpu.tower import CPUTower
from realizar.checkpoint.open import open_checkpoint
from realizar.engine.llm import LLM
from realizar.models.registry import build_tower
from realizar.sampling_params import SamplingParams

_FARTHEST = 1e-4  # of a feature or a log-probability
_SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def measure_images(kind: str) -> dict[str, float]:
    """Errors of a model of `vision_kinds` on the CPU, by `IMAGE_PARTS`: the norm of the difference over the norm.

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
            encoder = CPUTower(built, holder, threads=2)
            alike = replace(built, preparation=tower.preparation)  # of which a file may say less
            own = [features(encoder, alike, size) for size in SIZES]
            found.append(_error(np.concatenate(own), np.concatenate(wanted)))
        with LLM(vision.path, threads=2) as llm:
            for messages in CONVERSATIONS.values():
                (scored,) = llm.chat(messages, _SCORED)
                found.append(_error(np.array(logprobs(scored), np.float32), expected(vision, messages)[1]))
    return dict(zip(IMAGE_PARTS, found, strict=True))


def _error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    farthest = np.abs(found - wanted).max()
    if not farthest <= _FARTHEST:
        raise AssertionError(f"{farthest:.2e} from transformers")
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
