"""Small models that see, of random weights, as transformers saves them, and their towers as llama.cpp has them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from images.vision_kinds import (
    EDGE,
    IMAGE,
    KINDS,
    LFM2_MARKS,
    LFM2_PREPARED,
    MADE_MARKS,
    MARKS,
    MERGE,
    PATCH,
    SHOWN,
    SOFT_TOKENS,
    TEMPLATE,
    TEXT,
    TILE,
    kind_of,
)
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.images.decode import cut_up
from realizar.images.prepare import cut_of, patches_of
from realizar.models.registry import build_tower
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.tensors import tensor_source
from tiny_model import byte_symbols, write_tiny_model

SIZES = ((1, 1), (28, 28), (333, 777), (2000, 300), (3000, 2000))
"""Width and height of the images that are looked at."""
LFM2_GRIDS = {
    (1, 1): (1, 1, (16, 16)), (28, 28): (1, 1, (32, 32)), (333, 777): (2, 1, (48, 16)), (2000, 300): (1, 4, (8, 80)),
    (3000, 2000): (2, 2, (24, 32)),
}  # fmt: skip
"""Rows, columns, and height and width of the whole, as transformers' processor of LFM2-VL gave them (with torchvision,
which it needs) for images of `SIZES` and the tiles of the tiny model.
"""


class VisionModel(NamedTuple):
    """transformers' model, what prepares its images, and its tokenizer; and the folder that they were saved to."""

    model: Any
    processor: Any
    tokenizer: Any
    path: Path

    @property
    def kind(self) -> str:
        """As `kind_of` has it."""
        return kind_of(str(self.model.config.model_type))

    @property
    def gives_patches(self) -> bool:
        """True if its processor fits images to squares of patches, and gives these, square by square."""
        return self.kind in ("qwen", "glm4v")

    @property
    def template(self) -> str:
        """The chat template."""
        return TEMPLATE.replace("<image>", self.shown)

    @property
    def shown(self) -> str:
        """What the chat template writes for an image."""
        return SHOWN.get(self.kind, "<image>")

    @property
    def least_step(self) -> int:
        """Tokens of a step that reads prompts with images in as many chunks as it can."""
        if self.kind == "gemma4" and self.model.config.text_config.use_bidirectional_attention:
            return SOFT_TOKENS
        return (TILE // PATCH // MERGE) ** 2 if self.kind == "gemma3" else 7

    @property
    def feature(self) -> int:
        """The id that stands for a feature; that of Gemma 4 is padding."""
        return 0 if self.kind == "gemma4" else IMAGE

    def prepared(self, images: Sequence[Any]) -> Any:
        """The tensors of Pillow images that the model takes."""
        if self.kind == "lfm2_vl":
            return _lfm2_prepared(self.path, images)
        if self.kind != "smolvlm":
            return self.processor(images=images, return_tensors="pt")
        return self.processor(images=[images], return_row_col_info=True, return_tensors="pt")

    def text(self, template_text: str, prepared: Any) -> str:
        """A prompt with the marks of images as transformers' processors expand them."""
        if self.kind == "mistral3":
            sizes = [(height // PATCH // MERGE, width // PATCH // MERGE) for height, width in prepared["image_sizes"]]
            mark, rows = "[IMG]", [["[IMG]" * columns] * rows for rows, columns in sizes]
            expanded = ["[IMG_BREAK]".join(each) + "[IMG_END]" for each in rows]
        elif self.kind == "gemma3":
            mark, features = "<start_of_image>", "<image_soft_token>" * (TILE // PATCH // MERGE) ** 2
            expanded = [f"\n\n<start_of_image>{features}<end_of_image>\n\n"] * len(prepared["pixel_values"])
        elif self.kind == "lfm2_vl":
            from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

            lfm2 = object.__new__(Lfm2VlProcessor)  # the usual way wants an image processor
            lfm2.image_processor = SimpleNamespace(**LFM2_PREPARED)
            lfm2.image_start_token, lfm2.image_end_token, lfm2.image_thumbnail_token = LFM2_MARKS[2:5]
            mark = lfm2.image_token = "<image>"
            expanded = [
                lfm2.replace_image_token(prepared, place, use_image_special_tokens=True)
                for place in range(len(prepared["image_rows"]))
            ]
        elif self.kind == "internvl":
            mark, run = "<IMG_CONTEXT>", "<IMG_CONTEXT>" * (TILE // PATCH // MERGE) ** 2
            expanded = [f"<img>{run * int(count)}</img>" for count in prepared["num_patches"]]
        elif self.kind == "gemma4":
            mark = "<|image|>"
            expanded = [f"<|image>{mark * int(count)}<image|>" for count in prepared["num_soft_tokens_per_image"]]
        elif self.gives_patches:
            mark = MADE_MARKS[self.kind][1]
            expanded = [mark * int(grid.prod() // MERGE**2) for grid in prepared["image_grid_thw"]]
        else:
            from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

            processor = Idefics3Processor(self.processor, self.tokenizer, image_seq_len=(TILE // PATCH // MERGE) ** 2)
            mark, count = "<image>", template_text.count("<image>")
            expanded = [processor.replace_image_token(prepared, place) for place in range(count)]
        first, *others = template_text.split(mark)
        return first + "".join(each + other for each, other in zip(expanded, others, strict=True))

    def features(self, prepared: Any) -> Any:
        """Of the images that `prepared` has, [features, hidden_size of the text model], more of them side by side."""
        import torch

        model, pixels = self.model.model, prepared["pixel_values"]
        with torch.no_grad():
            if self.kind == "mistral3":
                sizes = prepared["image_sizes"]
                encoded = model.vision_tower(pixels, image_sizes=sizes).last_hidden_state
                return model.multi_modal_projector(encoded.squeeze(0), sizes).numpy()
            if self.gives_patches:
                found = model.visual(pixels, grid_thw=prepared["image_grid_thw"])
                more = getattr(found, "deepstack_features", None) or []
                return torch.cat([found.pooler_output, *more], 1).numpy()
            more = {
                "smolvlm": ["pixel_attention_mask"],
                "gemma4": ["image_position_ids"],
                "lfm2_vl": ["spatial_shapes", "pixel_attention_mask"],
            }
            found = model.get_image_features(
                pixels, *(prepared[name] for name in more.get(self.kind, ()))
            ).pooler_output
            return torch.cat([*found]).reshape(-1, TEXT["hidden_size"]).numpy()

    def inputs(self, ids: Any, prepared: Any) -> dict[str, Any]:
        """What the model takes, of the ids of one prompt [1, tokens] and its images."""
        others = ["rows", "cols", "num_crops", "num_patches", "image_rows", "image_cols"]
        others += ["num_soft_tokens_per_image"]
        others += ["image_sizes"] if self.kind == "lfm2_vl" else []
        tensors = {name: prepared[name] for name in prepared if name not in others}
        kinds = {"gemma3": "token_type_ids"} | dict.fromkeys(("qwen", "glm4v", "gemma4"), "mm_token_type_ids")
        more = {kinds[self.kind]: (ids == IMAGE).int()} if self.kind in kinds else {}
        return {"input_ids": ids, **tensors, **more}


def image_of(size: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random pixels, [height, width, 3], which are coarse, so that resizing leaves some of their contrast."""
    width, height = size
    coarse = np.random.default_rng(width).integers(0, 256, (-(-height // 9), -(-width // 9), 3), dtype=np.uint8)
    return coarse.repeat(9, 0).repeat(9, 1)[:height, :width]


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """A Pillow image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def build_vision_model(kind: str, path: Path) -> VisionModel:
    """A model of `KINDS`."""
    import torch
    from transformers import PreTrainedTokenizerFast

    model, processor, prepared = KINDS[kind]()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, values in model.named_parameters():
            spread = 0.15 if values.dim() > 1 else 0.3
            is_norm = any(each in name for each in ("norm", "ln_pre", "ln_q", "lambda")) and "bias" not in name
            values.copy_(torch.randn(values.shape, generator=generator) * spread + is_norm)
            if "vision_tower" in name and "q_norm" in name:  # where its weights are the scale of attention
                values *= 0.15
            if "visual.merger" in name and name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight")):
                values *= 2  # GLM's features are products of products
        for name, values in model.named_buffers():
            if name.endswith(("put_min", "put_max")):  # most numbers are within, and some are not
                values.copy_((1.0 if name.endswith("max") else -1.0) * (0.7 + torch.rand((), generator=generator)))
            if name.endswith(("std_bias", "std_scale")):
                values.copy_(torch.randn(values.shape, generator=generator) * 0.3 + name.endswith("scale"))
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(prepared))
    _write_tokenizer(path, kind_of(str(model.config.model_type)))
    return VisionModel(model, processor, PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json")), path)


def _lfm2_prepared(path: Path, images: Sequence[Any]) -> dict[str, Any]:
    """Pictures of realizar as the model takes them: the patches of each, as many as of the largest."""
    import torch

    tower = build_tower(open_checkpoint(path))
    assert tower is not None
    patches = [
        patches_of(tower, np.asarray(picture))
        for image in images
        for picture in cut_up(image, cut_of(tower, image.width, image.height))
    ]
    shapes = torch.tensor([each.shape[:2] for each in patches])
    pixels = torch.zeros(len(patches), int(shapes.prod(1).max()), patches[0].shape[2])
    for place, each in enumerate(patches):
        pixels[place, : each.shape[0] * each.shape[1]] = torch.from_numpy(each).flatten(0, 1)
    mask = torch.arange(pixels.shape[1]) < shapes.prod(1, keepdim=True)
    rows, columns, sizes = zip(*(LFM2_GRIDS[image.size] for image in images), strict=True)
    return {
        "pixel_values": pixels, "pixel_attention_mask": mask.int(), "spatial_shapes": shapes, "image_rows": rows,
        "image_cols": columns, "image_sizes": sizes,
    }  # fmt: skip


def _write_tokenizer(path: Path, kind: str) -> None:
    symbols, marks = byte_symbols(), MADE_MARKS[kind]
    added = [
        {"id": 256 + place, "content": text, "special": bool(text.strip()), "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for place, text in enumerate(marks)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {symbol: index for index, symbol in enumerate(symbols)}, "merges": [],
        },
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    template = TEMPLATE.replace("<image>", SHOWN.get(kind, "<image>"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": marks[0], "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def tower_metadata(hidden: int, layers: int, heads: int, width: int, text_hidden: int) -> dict[str, Any]:
    """The keys of a tower's GGUF file, whose images have the sizes of this module."""
    return {
        "general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
        "clip.projector_type": "idefics3", "clip.use_gelu": True, "clip.vision.embedding_length": hidden,
        "clip.vision.block_count": layers, "clip.vision.attention.head_count": heads,
        "clip.vision.feed_forward_length": width, "clip.vision.projection_dim": text_hidden,
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.vision.image_size": TILE,
        "clip.vision.patch_size": PATCH, "clip.vision.projector.scale_factor": MERGE,
        "clip.vision.preproc_image_size": EDGE, "clip.vision.image_mean": np.full(3, 0.5, np.float32),
        "clip.vision.image_std": np.full(3, 0.5, np.float32),
    }  # fmt: skip


def write_vision_files(
    folder: Path, kind: GGMLType = GGMLType.F32, seed: int = 3, sizes: tuple[int, int] = (64, 96)
) -> Path:
    """A tiny model that can be served, and beside it a tower of random weights: GGUF files. Returns the model's.

    The tower's matrices are of a `kind`, as of `stored`. `seed` is of its weights, and `sizes` are those of its stream
    and its feed-forwards.
    """
    path = folder / "tiny.gguf"
    write_tiny_model(path, TEMPLATE.replace(MARKS[0], "<|end|>"), marks=MARKS[1:])
    text = open_checkpoint(path).tensors["token_embd.weight"].shape[-1]
    hidden, width, patches = *sizes, (TILE // PATCH) ** 2
    block = {
        **{f"ln{place}.weight": (hidden,) for place in (1, 2)}, **{f"ln{place}.bias": (hidden,) for place in (1, 2)},
        **{f"attn_{name}.weight": (hidden, hidden) for name in ("q", "k", "v", "out")},
        **{f"attn_{name}.bias": (hidden,) for name in ("q", "k", "v", "out")},
        "ffn_up.weight": (width, hidden), "ffn_up.bias": (width,),
        "ffn_down.weight": (hidden, width), "ffn_down.bias": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (hidden, 3, PATCH, PATCH), "v.patch_embd.bias": (hidden,),
        "v.position_embd.weight": (patches, hidden), "v.post_ln.weight": (hidden,), "v.post_ln.bias": (hidden,),
        "mm.model.fc.weight": (text, hidden * MERGE**2),
        **{f"v.blk.{layer}.{name}": shape for layer in (0, 1) for name, shape in block.items()},
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = [stored(name, each, kind) for name, each in values.items()]
    write_gguf(folder / "mmproj-tiny.gguf", tower_metadata(hidden, 2, 4, width, text), tensors)
    return path


def in_float32(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights."""
    tensors = {
        name: replace(each, ggml_type=GGMLType.F32, data=tensor_source(checkpoint, name).dequantize().view(np.uint8))
        for name, each in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def stored(name: str, values: np.ndarray[Any, np.dtype[np.float32]], kind: GGMLType) -> NewTensor:
    """In F32, F16, BF16 or Q8_0, or random blocks of another kind. Vectors and what is no whole blocks stay float32."""
    if values.ndim == 1 or values.shape[-1] % kind.block_size or kind == GGMLType.F32:
        return NewTensor(name, GGMLType.F32, values.shape, values.view(np.uint8).reshape(-1))
    if kind == GGMLType.F16:
        data = values.astype(np.float16).view(np.uint8)
    elif kind == GGMLType.BF16:
        data = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
    elif kind != GGMLType.Q8_0:
        data = random_blocks(kind, *values.shape, np.random.default_rng(len(name)), float(values.std()), centred=True)
    else:
        blocks = values.reshape(-1, 32)
        scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
        data = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    return NewTensor(name, kind, values.shape, data.reshape(-1))
