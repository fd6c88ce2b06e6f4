"""Small models that see, of random weights, as transformers saves them, and their towers as llama.cpp has them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.images.decode import cut_up
from realizar.images.prepare import cut_of, patches_of
from realizar.models.registry import build_tower
from tiny_model import byte_symbols, write_tiny_model

EDGE, TILE, PATCH, MERGE = 96, 32, 4, 2
IMAGE = 257
MARKS = (
    "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)  # fmt: skip
QWEN_MARKS = ("<end_of_utterance>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
GEMMA3_MARKS = ("<end_of_utterance>", "<image_soft_token>", "<start_of_image>", "<end_of_image>", "\n\n\n")
"""The last is no control token: it takes in the end of the text before an image."""
GEMMA4_MARKS = ("<end_of_utterance>", "<|image|>", "<|image>", "<image|>")
MISTRAL_MARKS = ("<end_of_utterance>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
LFM2_MARKS = (
    "<end_of_utterance>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)),
)  # fmt: skip
INTERNVL_MARKS = ("<end_of_utterance>", "<IMG_CONTEXT>", "<img>", "</img>")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %} {{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = ((1, 1), (28, 28), (333, 777), (2000, 300), (3000, 2000))
"""Width and height of the images that are looked at."""
LFM2_GRIDS = {
    (1, 1): (1, 1, (16, 16)), (28, 28): (1, 1, (32, 32)), (333, 777): (2, 1, (48, 16)), (2000, 300): (1, 4, (8, 80)),
    (3000, 2000): (2, 2, (24, 32)),
}  # fmt: skip
"""Rows, columns, and height and width of the whole, as transformers' processor of LFM2-VL gave them (with torchvision,
which it needs) for images of `SIZES` and the tiles of the tiny model.
"""
_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
VISION = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": TILE, "patch_size": PATCH,
}  # fmt: skip


class VisionModel(NamedTuple):
    """transformers' model, what prepares its images, and its tokenizer; and the folder that they were saved to."""

    model: Any
    processor: Any
    tokenizer: Any
    path: Path

    @property
    def kind(self) -> str:
        """`smolvlm`, `mistral3`, `gemma3`, `gemma4`, `lfm2_vl`, `internvl`, or `qwen` for Qwen's models."""
        return _kind_of(str(self.model.config.model_type))

    @property
    def template(self) -> str:
        """The chat template."""
        return TEMPLATE.replace("<image>", self.shown)

    @property
    def shown(self) -> str:
        """What the chat template writes for an image."""
        return _SHOWN.get(self.kind, "<image>")

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
        elif self.kind == "qwen":
            mark = "<|image_pad|>"
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
            if self.kind == "qwen":
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
            return torch.cat([*found]).reshape(-1, _TEXT["hidden_size"]).numpy()

    def inputs(self, ids: Any, prepared: Any) -> dict[str, Any]:
        """What the model takes, of the ids of one prompt [1, tokens] and its images."""
        others = ["rows", "cols", "num_crops", "num_patches", "image_rows", "image_cols"]
        others += ["num_soft_tokens_per_image"]
        others += ["image_sizes"] if self.kind == "lfm2_vl" else []
        tensors = {name: prepared[name] for name in prepared if name not in others}
        kinds = {"qwen": "mm_token_type_ids", "gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
        more = {kinds[self.kind]: (ids == IMAGE).int()} if self.kind in kinds else {}
        return {"input_ids": ids, **tensors, **more}


def _kind_of(model_type: str) -> str:
    return "qwen" if model_type.startswith("qwen") else model_type


_SHOWN = {
    "mistral3": "[IMG]", "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "{{ '\n' }}<start_of_image>", "gemma4": "<|image|>", "internvl": "<IMG_CONTEXT>",
}  # fmt: skip
_MADE_MARKS = {
    "smolvlm": MARKS, "mistral3": MISTRAL_MARKS, "qwen": QWEN_MARKS, "gemma3": GEMMA3_MARKS, "gemma4": GEMMA4_MARKS,
    "lfm2_vl": LFM2_MARKS, "internvl": INTERNVL_MARKS,
}  # fmt: skip
SOFT_TOKENS = 70
"""Most tokens of an image of Gemma 4's, by its processor here."""


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
        for name, values in model.named_buffers():
            if name.endswith(("put_min", "put_max")):  # most numbers are within, and some are not
                values.copy_((1.0 if name.endswith("max") else -1.0) * (0.7 + torch.rand((), generator=generator)))
            if name.endswith(("std_bias", "std_scale")):
                values.copy_(torch.randn(values.shape, generator=generator) * 0.3 + name.endswith("scale"))
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(prepared))
    _write_tokenizer(path, _kind_of(str(model.config.model_type)))
    return VisionModel(model, processor, PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json")), path)


def _smolvlm() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    text = {"model_type": "llama", "vocab_size": 256 + len(MARKS), **_TEXT}
    config = SmolVLMConfig(text_config=text, vision_config=VISION, scale_factor=MERGE, image_token_id=IMAGE)
    prepared = {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": TILE}}
    model = SmolVLMForConditionalGeneration(config).float().eval()
    return model, Idefics3ImageProcessorPil(**prepared), prepared | {"do_image_splitting": True, "resample": 1}


def _mistral3() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    text = {"model_type": "mistral", "vocab_size": 256 + len(MISTRAL_MARKS), "sliding_window": None, **_TEXT}
    vision = {"model_type": "pixtral", "head_dim": 16, **VISION, "intermediate_size": 24}
    config = Mistral3Config(
        text_config=text, vision_config=vision, spatial_merge_size=MERGE, image_token_index=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip
    square = PATCH * MERGE
    processor = PixtralImageProcessorPil(size={"longest_edge": TILE}, patch_size={"height": square, "width": square})
    return Mistral3ForConditionalGeneration(config).float().eval(), processor, {"size": {"longest_edge": TILE}}


def _gemma3() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    text = {"vocab_size": 256 + len(GEMMA3_MARKS), **_TEXT, "pad_token_id": 0, "sliding_window": 24}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    count = (TILE // PATCH // MERGE) ** 2
    config = Gemma3Config(
        text_config=text, vision_config=VISION | {"vision_use_head": False}, mm_tokens_per_image=count,
        image_token_index=IMAGE,
    )  # fmt: skip
    prepared = {"size": {"height": TILE, "width": TILE}, "image_seq_length": count, "do_pan_and_scan": None}
    processor = Gemma3ImageProcessorPil(size=prepared["size"])
    return Gemma3ForConditionalGeneration(config).float().eval(), processor, prepared | {"resample": 2}


def _internvl() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    text = {"model_type": "qwen2", "vocab_size": 256 + len(INTERNVL_MARKS), **_TEXT}
    config = InternVLConfig(
        text_config=text, vision_config=VISION | {"attention_bias": True}, image_token_id=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip
    prepared = {"size": {"height": TILE, "width": TILE}, "max_patches": 4}
    processor = GotOcr2ImageProcessorPil(crop_to_patches=True, **prepared)
    return InternVLForConditionalGeneration(config).float().eval(), processor, prepared


LFM2_PREPARED = {
    "tile_size": TILE, "encoder_patch_size": PATCH, "downsample_factor": MERGE, "min_image_tokens": 4,
    "max_image_tokens": 16, "min_tiles": 2, "max_tiles": 4, "use_thumbnail": True,
}  # fmt: skip


def _lfm2_vl() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    text = {"model_type": "lfm2", "vocab_size": 256 + len(LFM2_MARKS), **_TEXT, "norm_eps": 1e-5, "pad_token_id": 0}
    text |= {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    vision = {"model_type": "siglip2_vision_model", "vision_use_head": False, **VISION, **_LFM2_POSITIONS}
    del vision["image_size"]
    config = Lfm2VlConfig(
        text_config=text, vision_config=vision, downsample_factor=MERGE, projector_hidden_size=40, image_token_id=IMAGE
    )
    return Lfm2VlForConditionalGeneration(config).float().eval(), None, LFM2_PREPARED | {"resample": 2}


_LFM2_POSITIONS = {"num_patches": 49}


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


def _gemma4(text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    own = {"vocab_size": 256 + len(GEMMA4_MARKS), "sliding_window": 24, "global_head_dim": 32, "num_hidden_layers": 4}
    own |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0}
    sizes = {"num_key_value_heads": 3, "head_dim": 16, "position_embedding_size": 1024}
    config = Gemma4Config(
        text_config={**_TEXT, **own, **text}, vision_config={**VISION, **sizes, **vision}, audio_config=None,
        image_token_id=IMAGE,
    )  # fmt: skip
    prepared = {"max_soft_tokens": SOFT_TOKENS, "patch_size": PATCH, "pooling_kernel_size": 3}
    model = Gemma4ForConditionalGeneration(config).float().eval()
    return model, Gemma4ImageProcessorPil(**prepared), prepared | {"do_normalize": False, "resample": 3}


_LIKE_31B = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
_LIKE_E2B = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 260, "num_kv_shared_layers": 2}
_CLIPPED = {"use_clipped_linears": True, "hidden_size": 96, "head_dim": 32, "intermediate_size": 160}
"""Its matrices have whole blocks of 32 columns."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip


def _qwen(family: str, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {"vocab_size": 256 + len(QWEN_MARKS), "rope_parameters": _ROPE, **_TEXT, **text}
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "depth": 2, "num_heads": 3, "patch_size": PATCH,
        "out_hidden_size": _TEXT["hidden_size"], **vision,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False
    )
    prepared = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE}
    if "3" in family:
        prepared |= {
            "size": {"shortest_edge": 256, "longest_edge": 2048},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
    else:
        prepared |= {"min_pixels": 256, "max_pixels": 2048}
    processor = Qwen2VLImageProcessorPil(**prepared)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return model.float().eval(), processor, prepared


_LEARNED = {"num_position_embeddings": (TILE // PATCH) ** 2}
_TAKEN = _LEARNED | {"deepstack_visual_indexes": [0, 1]}
_WINDOWS = {"window_size": 24, "fullatt_block_indexes": [1]}  # of 6 x 6 patches
_IN_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
KINDS: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "smolvlm": _smolvlm,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "lfm2_vl": _lfm2_vl,
    "internvl": _internvl,
    "gemma4": lambda: _gemma4(_LIKE_31B, {"standardize": True}),
    "gemma4_e": lambda: _gemma4(_LIKE_E2B, _CLIPPED),
    "qwen3_vl": lambda: _qwen("Qwen3VL", {}, _TAKEN),
    "qwen3_vl_moe": lambda: _qwen("Qwen3VLMoe", _EXPERTS, _TAKEN),
    "qwen3_5": lambda: _qwen("Qwen3_5", _DELTA, _LEARNED),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL", {"rope_parameters": _IN_SECTIONS}, _WINDOWS),
}


def _write_tokenizer(path: Path, kind: str) -> None:
    symbols, marks = byte_symbols(), _MADE_MARKS[kind]
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
    template = TEMPLATE.replace("<image>", _SHOWN.get(kind, "<image>"))
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


def write_vision_files(folder: Path, kind: GGMLType = GGMLType.F32, seed: int = 3) -> Path:
    """A tiny model that can be served, and beside it a tower of random weights: GGUF files. Returns the model's.

    The tower's matrices are of a `kind`: F32, F16, BF16 or Q8_0. `seed` is of its weights.
    """
    path = folder / "tiny.gguf"
    write_tiny_model(path, TEMPLATE.replace(MARKS[0], "<|end|>"), marks=MARKS[1:])
    text = open_checkpoint(path).tensors["token_embd.weight"].shape[-1]
    hidden, width, patches = 64, 96, (TILE // PATCH) ** 2
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


def stored(name: str, values: np.ndarray[Any, np.dtype[np.float32]], kind: GGMLType) -> NewTensor:
    """Vectors and what is no whole blocks stay float32."""
    if values.ndim == 1 or values.shape[-1] % 32 or kind == GGMLType.F32:
        return NewTensor(name, GGMLType.F32, values.shape, values.view(np.uint8).reshape(-1))
    if kind == GGMLType.F16:
        data = values.astype(np.float16).view(np.uint8)
    elif kind == GGMLType.BF16:
        data = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
    else:
        blocks = values.reshape(-1, 32)
        scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        codes = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
        data = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    return NewTensor(name, kind, values.shape, data.reshape(-1))
