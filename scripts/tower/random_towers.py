"""Encoders of images with random weights, in the shapes of published ones and with llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.tower import Tower

PATCH, MERGE, SIDE = 16, 2, 48
QWEN3_VL_8B: dict[str, Any] = {
    "hidden": 1152, "width": 4304, "layers": 27, "heads": 16, "text": 4096, "taken": (8, 16, 24)
}  # fmt: skip
QWEN3_VL_2B: dict[str, Any] = {
    "hidden": 1024, "width": 4096, "layers": 24, "heads": 16, "text": 2048, "taken": (5, 11, 17)
}  # fmt: skip
GEMMA4_31B: dict[str, Any] = {
    "hidden": 1152, "width": 4304, "layers": 27, "heads": 16, "text": 5376, "bounded": False
}  # fmt: skip
GEMMA4_E2B: dict[str, Any] = {
    "hidden": 768, "width": 3072, "layers": 16, "heads": 12, "text": 1536, "bounded": True
}  # fmt: skip
SMALL: dict[str, Any] = {"hidden": 144, "width": 304, "layers": 2, "heads": 2, "text": 128, "taken": (0,)}


def qwen3vl(hidden: int, width: int, layers: int, heads: int, text: int, taken: tuple[int, ...]) -> Checkpoint:
    """Of Qwen3-VL's kind. `taken` are the layers whose states go to the first layers of the text model."""
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
    sizes = {"attn_qkv": (3 * hidden, hidden), "attn_out": (hidden, hidden)}
    sizes |= {"ffn_up": (width, hidden), "ffn_down": (hidden, width)}
    own = {
        "clip.projector_type": "qwen3vl_merger", "clip.vision.image_size": SIDE * PATCH,
        "clip.vision.spatial_merge_size": MERGE,
        "clip.vision.is_deepstack_layers": np.array([layer in taken for layer in range(layers)]),
    }  # fmt: skip
    return _random(layers, heads, text, sizes, matrices, vectors, norms, own)


def gemma4v(hidden: int, width: int, layers: int, heads: int, text: int, bounded: bool) -> Checkpoint:
    """Of Gemma 4's kind: with bounds of each layer's matrices, which few numbers reach, or mean and deviation."""
    side, head = 10240, hidden // heads
    matrices = {
        "v.patch_embd.weight": (hidden, 3, PATCH, PATCH), "v.position_embd.weight": (2, side, hidden),
        "mm.input_projection.weight": (text, hidden),
    }  # fmt: skip
    sizes = {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "out")}
    sizes |= {"ffn_gate": (width, hidden), "ffn_up": (width, hidden), "ffn_down": (hidden, width)}
    norms = {f"v.blk.{layer}.attn_{name}_norm": head for layer in range(layers) for name in "qk"}
    norms |= {
        f"v.blk.{layer}.{name}": hidden for layer in range(layers) for name in ("attn_post_norm", "ffn_post_norm")
    }
    vectors = {} if bounded else {"v.std_bias": hidden, "v.std_scale": hidden}
    if bounded:
        ends = [f"{way}_{end}" for way in ("input", "output") for end in ("min", "max")]
        vectors |= {f"v.blk.{layer}.{name}.{end}": 1 for layer in range(layers) for name in sizes for end in ends}
    own = {
        "clip.projector_type": "gemma4v", "clip.vision.image_size": 224, "clip.vision.projector.scale_factor": 3,
        "clip.vision.image_mean": np.zeros(3, np.float32), "clip.vision.image_std": np.ones(3, np.float32),
    }  # fmt: skip
    return _random(layers, heads, text, sizes, matrices, vectors, norms, own, biases=False)


def smolvlm() -> Checkpoint:
    """Of SmolVLM-256M's shape: a tile of 512 x 512 pixels, of which each 4 x 4 patches are a token."""
    hidden, text, merge, edge = 768, 576, 4, 512
    square = {f"attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "out")}
    sizes = square | {"ffn_up": (4 * hidden, hidden), "ffn_down": (hidden, 4 * hidden)}
    matrices = {
        "v.patch_embd.weight": (hidden, 3, PATCH, PATCH), "v.position_embd.weight": ((edge // PATCH) ** 2, hidden),
        "mm.model.fc.weight": (text, hidden * merge**2),
    }  # fmt: skip
    own = {
        "clip.projector_type": "idefics3", "clip.vision.image_size": edge, "clip.vision.preproc_image_size": edge,
        "clip.vision.projector.scale_factor": merge,
    }  # fmt: skip
    return _random(12, 12, text, sizes, matrices, {"v.patch_embd.bias": hidden}, {"v.post_ln": hidden}, own)


def _random(
    layers: int, heads: int, text: int, sizes: Mapping[str, tuple[int, int]],
    matrices: Mapping[str, tuple[int, ...]], vectors: Mapping[str, int], norms: Mapping[str, int],
    own: Mapping[str, Any], *, biases: bool = True,
) -> Checkpoint:  # fmt: skip
    """Matrices in bf16, vectors in float32. `sizes` are those of each layer's matrices; norms have `biases` too."""
    width, hidden = sizes["ffn_up"]
    blocks = [f"v.blk.{layer}" for layer in range(layers)]
    all_matrices = {**matrices, **{f"{at}.{name}.weight": shape for at in blocks for name, shape in sizes.items()}}
    all_norms = {**norms, **{f"{at}.{name}": hidden for at in blocks for name in ("ln1", "ln2")}}
    all_vectors = {**vectors, **{f"{name}.weight": size for name, size in all_norms.items()}}
    if biases:
        all_vectors |= {f"{at}.{name}.bias": shape[0] for at in blocks for name, shape in sizes.items()}
        all_vectors |= {f"{name}.bias": size for name, size in all_norms.items()}
    rng, path = np.random.default_rng(5), Path("random")
    noise = rng.standard_normal(1 << 20, np.float32)
    tensors = {}
    for name, shape in all_matrices.items():
        values = np.roll(noise, int(rng.integers(len(noise)))) * np.float32(int(np.prod(shape[1:])) ** -0.5)
        bits = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        data = np.resize(bits, int(np.prod(shape))).view(np.uint8)
        tensors[name] = StoredTensor(name, GGMLType.BF16, shape, data, path, 0)
    for name, size in all_vectors.items():
        values = rng.standard_normal(size, np.float32) * np.float32(0.1)
        values += np.float32(name.removesuffix(".weight") in all_norms and name.endswith("weight"))
        if name.endswith("attn_q_norm.weight"):  # of Gemma 4's, where it is the scale of attention, too
            values *= np.float32(0.15)
        if name.endswith(("_min", "_max")):  # a bound: of what some matrices read together
            values = np.full(size, 4.0 if name.endswith("_max") else -4.0, np.float32)
        tensors[name] = StoredTensor(name, GGMLType.F32, (size,), values.view(np.uint8), path, 0)
    metadata: dict[str, Any] = {
        "general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
        "clip.use_gelu": True, "clip.vision.embedding_length": hidden, "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": heads, "clip.vision.feed_forward_length": width,
        "clip.vision.projection_dim": text, "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.patch_size": PATCH, "clip.vision.image_mean": np.full(3, 0.5, np.float32),
        "clip.vision.image_std": np.full(3, 0.5, np.float32), **own,
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
