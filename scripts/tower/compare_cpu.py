"""Encoders of images on the processor, beside llama.cpp's and the processor's products in float32 (numpy).

    python scripts/tower/compare_cpu.py --peer BUILD/bin/llama-mtmd-cli [--threads 2] [--rounds 5] [--types F16,Q8_0]

Weights are random, in the shapes of SmolVLM-256M (a tile of 512 x 512) and Qwen3-VL-2B (768 x 768). Both programs read
the same file and the same picture, by turns. The peer's time is what it says of an image slice, which holds neither the
decoding of the picture nor its resizing, nor does ours. Medians of the rounds, after one that is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_serve import write_model
from random_towers import PATCH, QWEN3_VL_2B, flops, qwen3vl, random_picture, smolvlm

from realizar.backends.cpu.tower import CPUTower
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.images.prepare import patches_of
from realizar.models.generated.shapes import SHAPES, Shape
from realizar.models.registry import build_tower

_ENCODED = re.compile(r"(?:batch encoding done|slice encoded) in (\d+) ms")
_VOCABULARY = 128256
_KINDS: dict[str, tuple[Callable[[], Checkpoint], int, Shape]] = {
    "SmolVLM-256M": (smolvlm, 512, Shape("llama", 1, 576, 1536, 9, 3, 64, _VOCABULARY, True, 1e5, 1e-5, 8192)),
    "Qwen3-VL-2B": (
        lambda: qwen3vl(**QWEN3_VL_2B), 768,
        Shape("qwen3", 4, 2048, 6144, 16, 8, 128, _VOCABULARY, True, 5e6, 1e-6, 8192),
    ),
}  # fmt: skip
"""The encoder, the edge of its picture, and a text model of a few layers, without which the peer does not start."""


def write_mmproj(path: Path, checkpoint: Checkpoint, ggml_type: GGMLType) -> None:
    """Matrices in that type, positions in float32 and patches in 16 bits, as converters keep them."""
    tensors = []
    for name, each in checkpoint.tensors.items():
        shape = each.shape
        if each.ggml_type is GGMLType.F32:
            tensors.append(NewTensor(name, GGMLType.F32, shape, each.data))
            continue
        values = (each.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        kept = GGMLType.F32 if "position" in name else GGMLType.F16 if "patch" in name else ggml_type
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kept.name])
        tensors.append(NewTensor(name, kept, shape, np.ascontiguousarray(data).view(np.uint8).reshape(-1)))
    write_gguf(path, dict(checkpoint.metadata), tensors)


def write_text_model(path: Path, folder: Path, shape: Shape, num_taken: int) -> None:
    """A text model that takes the encoder's features; as one of qwen3vl where layers take some."""
    SHAPES["beside a tower"] = shape
    write_model("beside a tower", path, folder)
    if not num_taken:
        return
    checkpoint = open_checkpoint(path)
    metadata = {name.replace("qwen3.", "qwen3vl."): value for name, value in checkpoint.metadata.items()}
    metadata |= {
        "general.architecture": "qwen3vl", "qwen3vl.n_deepstack_layers": num_taken,
        "qwen3vl.rope.dimension_sections": np.array([24, 20, 20, 0], np.int32),
    }  # fmt: skip
    stored = [(each, each.ggml_type) for each in checkpoint.tensors.values()]
    tensors = [NewTensor(each.name, kind, each.shape, each.data) for each, kind in stored if kind is not None]
    write_gguf(path.with_suffix(".new"), metadata, tensors)
    path.with_suffix(".new").replace(path)


def peer_ms(command: list[str]) -> float:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = _ENCODED.findall(done.stdout)
    if not found:
        raise SystemExit(f"the peer encoded nothing:\n{done.stdout[-2000:]}")
    return float(found[0])


def ours_ms(tower: CPUTower, picture: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    patches = patches_of(tower.tower, picture)
    started_s = time.perf_counter()
    tower.encode(patches)
    return (time.perf_counter() - started_s) * 1e3


def peak_flops(threads: int) -> float:
    """FLOP/s of a product of float32 in numpy, the best of some."""
    script = (
        "import numpy as np, time; a = np.random.rand(3072, 3072).astype(np.float32); best = 9e9\n"
        "for _ in range(6):\n    s = time.perf_counter(); a @ a; best = min(best, time.perf_counter() - s)\n"
        "print(2 * 3072**3 / best)"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, stdout=subprocess.PIPE)
    return float(done.stdout)


def compare(name: str, ggml_type: GGMLType, folder: Path, asked: argparse.Namespace) -> None:
    make, edge, shape = _KINDS[name]
    mmproj, text, image = folder / "mmproj.gguf", folder / "text.gguf", folder / "picture.png"
    write_mmproj(mmproj, make(), ggml_type)
    checkpoint = open_checkpoint(mmproj)
    tower = build_tower(checkpoint)
    assert tower is not None
    write_text_model(text, folder, shape, len(tower.projectors) - 1)
    picture = random_picture(edge // PATCH, edge // PATCH)
    Image.fromarray(picture).save(image)
    command = [
        str(asked.peer), "-m", str(text), "--mmproj", str(mmproj), "--image", str(image), "-p", "a", "-n", "1",
        "-t", str(asked.threads), "-c", "2048", "--no-warmup", "--chat-template", "chatml", "--temp", "0",
    ]  # fmt: skip
    encoder = CPUTower(tower, checkpoint, asked.threads)
    times: Mapping[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(asked.rounds + 1):
        times["ours"].append(ours_ms(encoder, picture))
        times["theirs"].append(peer_ms(command))
    ours, theirs = (statistics.median(each[1:]) for each in times.values())
    work, peak = flops(tower, (edge // PATCH) ** 2), peak_flops(asked.threads)
    print(
        f"{name} {ggml_type.name}, {edge} x {edge}, {work / 1e9:.0f} GFLOP: {ours:.0f} ms, llama.cpp {theirs:.0f} ms,"
        f" {theirs / ours:.2f} times; of {peak / 1e9:.0f} GFLOP/s in float32 {work / ours * 1e3 / peak:.0%}"
        f" and {work / theirs * 1e3 / peak:.0%}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--types", default="F16,Q8_0")
    parser.add_argument("--kinds", default=",".join(_KINDS))
    asked = parser.parse_args()
    for name in asked.kinds.split(","):
        for ggml_type in asked.types.split(","):
            with tempfile.TemporaryDirectory() as folder:
                compare(name, GGMLType[ggml_type], Path(folder), asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
