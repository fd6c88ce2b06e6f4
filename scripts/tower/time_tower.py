"""Times an encoder of images on a GPU, of random weights in the shape of a published one, beside the card's bound.

    python scripts/tower/time_tower.py --grids 64x64,32x48,128x128
    python scripts/tower/time_tower.py --grids 64x64 --profile

A grid is rows and columns of patches. Of each: ms of the graph alone, and of `encode` with the copies of pixels and
features; the share of the time that its products and attention would take at 800 TFLOP/s. With `--check` the features
of the first grid are compared with the CPU's; with `--small` the tower has two narrow layers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realizar.backends.cuda.tower import CUDATower
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.registry import build_tower
from realizar.models.tower import Tower

BOUND = 800e12  # FLOP/s of products in 16 bits that an H200 can reach
PATCH, MERGE, SIDE = 16, 2, 48
LARGE: dict[str, Any] = {"hidden": 1152, "width": 4304, "layers": 27, "heads": 16, "text": 4096, "taken": (8, 16, 24)}
"""Of Qwen3-VL-8B."""
SMALL: dict[str, Any] = {"hidden": 144, "width": 304, "layers": 2, "heads": 2, "text": 128, "taken": (0,)}


def random_checkpoint(
    hidden: int, width: int, layers: int, heads: int, text: int, taken: tuple[int, ...]
) -> Checkpoint:
    """A tower of Qwen3-VL's kind, with random matrices in bf16."""
    square = hidden * MERGE**2
    matrices = {
        "v.patch_embd.weight": (hidden, 3, PATCH, PATCH), "v.patch_embd.weight.1": (hidden, 3, PATCH, PATCH),
        "v.position_embd.weight": (SIDE**2, hidden), "mm.0.weight": (square, square), "mm.2.weight": (text, square),
    }  # fmt: skip
    vectors: dict[str, int] = {"v.patch_embd.bias": hidden, "mm.0.bias": square, "mm.2.bias": text}
    norms = {"v.post_ln": hidden}
    for layer in taken:
        at = f"v.deepstack.{layer}"
        matrices |= {f"{at}.fc1.weight": (square, square), f"{at}.fc2.weight": (text, square)}
        vectors |= {f"{at}.fc1.bias": square, f"{at}.fc2.bias": text}
        norms[f"{at}.norm"] = square
    for layer in range(layers):
        at = f"v.blk.{layer}"
        sizes = {"attn_qkv": (3 * hidden, hidden), "attn_out": (hidden, hidden)}
        sizes |= {"ffn_up": (width, hidden), "ffn_down": (hidden, width)}
        matrices |= {f"{at}.{name}.weight": shape for name, shape in sizes.items()}
        vectors |= {f"{at}.{name}.bias": shape[0] for name, shape in sizes.items()}
        norms |= {f"{at}.ln1": hidden, f"{at}.ln2": hidden}
    rng = np.random.default_rng(5)
    noise = rng.standard_normal(1 << 20, np.float32)
    path = Path("random")
    tensors = {}
    for name, shape in matrices.items():
        values = np.roll(noise, int(rng.integers(len(noise)))) * np.float32(int(np.prod(shape[1:])) ** -0.5)
        bits = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        data = np.resize(bits, int(np.prod(shape))).view(np.uint8)
        tensors[name] = StoredTensor(name, GGMLType.BF16, shape, data, path, 0)
    vectors |= {f"{name}.{part}": size for name, size in norms.items() for part in ("weight", "bias")}
    for name, size in vectors.items():
        values = rng.standard_normal(size, np.float32) * np.float32(0.1)
        values += np.float32(name.removesuffix(".weight") in norms and name.endswith("weight"))
        tensors[name] = StoredTensor(name, GGMLType.F32, (size,), values.view(np.uint8), path, 0)
    flags = [layer in taken for layer in range(layers)]
    metadata: dict[str, Any] = {
        "general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen3vl_merger", "clip.use_gelu": True, "clip.vision.embedding_length": hidden,
        "clip.vision.block_count": layers, "clip.vision.attention.head_count": heads,
        "clip.vision.feed_forward_length": width, "clip.vision.projection_dim": text,
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.vision.image_size": SIDE * PATCH,
        "clip.vision.patch_size": PATCH, "clip.vision.spatial_merge_size": MERGE,
        "clip.vision.is_deepstack_layers": np.array(flags), "clip.vision.image_mean": np.full(3, 0.5, np.float32),
        "clip.vision.image_std": np.full(3, 0.5, np.float32),
    }  # fmt: skip
    return Checkpoint(path, "gguf", metadata, tensors)


def flops(tower: Tower, patches: int) -> float:
    """Of the products and attention of a picture."""
    squares, total = patches // tower.merge**2, 0.0
    for linear in (*tower.patches, *(each for layer in tower.layers for each in layer.linears())):
        total += 2.0 * patches * linear.out_features * linear.in_features
    for projector in tower.projectors:
        total += sum(2.0 * squares * each.out_features * each.in_features for each in projector.linears())
    return total + sum(4.0 * patches**2 * one.num_heads * one.head_size for _, one in tower.attentions())


def random_picture(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(rows).integers(0, 256, (rows * PATCH, columns * PATCH, 3), dtype=np.uint8)


def median_ms(run: Any, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times)


def graph_ms(encoder: CUDATower, rows: int, columns: int, rounds: int) -> float:
    """Of the kernels alone, from event to event, in the clock that the card holds."""
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        encoder.start(rows, columns)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def print_profile(encoder: CUDATower, rows: int, columns: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        encoder.start(rows, columns)
        torch.cuda.synchronize()
    listed = sorted(found.key_averages(), key=lambda each: -each.self_device_time_total)
    for each in listed[:16]:
        print(f"  {each.self_device_time_total / 1e3:8.3f} ms {each.count:5} x  {each.key[:90]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", default="64x64")
    parser.add_argument("--rounds", type=int, default=20)
    for name in ("check", "small", "profile"):
        parser.add_argument(f"--{name}", action="store_true")
    asked = parser.parse_args()
    checkpoint = random_checkpoint(**(SMALL if asked.small else LARGE))
    tower = build_tower(checkpoint)
    assert tower is not None
    encoder = CUDATower(tower, checkpoint, torch.device("cuda", 0))
    print(f"{torch.cuda.get_device_name()}, {encoder.size_bytes / 1e6:,.0f} MB of weights and buffers", flush=True)
    grids = [tuple(map(int, grid.split("x"))) for grid in asked.grids.split(",")]
    if asked.check:
        from realizar.backends.cpu.tower import CPUTower
        from realizar.images.prepare import patches_of

        picture = random_picture(*grids[0])
        wanted = CPUTower(tower, checkpoint, threads=8).encode(patches_of(tower, picture))
        for _ in range(3):
            found = encoder.encode(picture)
            print(f"apart from the CPU: {np.linalg.norm(found - wanted) / np.linalg.norm(wanted):.2e} of the norm")
    for rows, columns in grids:
        picture = random_picture(rows, columns)
        first_ms, second_ms = (median_ms(lambda: encoder.encode(picture), 1) for _ in range(2))  # noqa: B023
        whole_ms = median_ms(lambda: encoder.encode(picture), asked.rounds)  # noqa: B023
        alone_ms, work = graph_ms(encoder, rows, columns, asked.rounds), flops(tower, rows * columns)
        print(
            f"{rows} x {columns} patches: {alone_ms:.2f} ms, {work / 1e12:.2f} TFLOP, {work / alone_ms / 1e9:.0f}"
            f" TFLOP/s, {work / BOUND * 1e3 / alone_ms:.0%} of the bound; encode {whole_ms:.1f} ms, the first"
            f" {first_ms:.0f}, with its capture {second_ms:.0f}",
            flush=True,
        )  # fmt: skip
        if asked.profile:
            print_profile(encoder, rows, columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
