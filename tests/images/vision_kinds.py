"""Small models that see, of random weights, as transformers builds them: one of each kind, and its processor."""

from __future__ import annotations

from functools import partial
from typing import Any

EDGE, TILE, PATCH, MERGE = 96, 32, 4, 2
IMAGE = 257
MARKS = (
    "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)  # fmt: skip
QWEN_MARKS = ("<end_of_utterance>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
GLM_MARKS = ("<end_of_utterance>", "<|image|>", "<|begin_of_image|>", "<|end_of_image|>")
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
SOFT_TOKENS = 70
"""Most tokens of an image of Gemma 4's, by its processor here."""
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
VISION = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": TILE, "patch_size": PATCH,
}  # fmt: skip
SHOWN = {
    "mistral3": "[IMG]", "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "{{ '\n' }}<start_of_image>", "gemma4": "<|image|>", "internvl": "<IMG_CONTEXT>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
}  # fmt: skip
MADE_MARKS = {
    "smolvlm": MARKS, "mistral3": MISTRAL_MARKS, "qwen": QWEN_MARKS, "gemma3": GEMMA3_MARKS, "gemma4": GEMMA4_MARKS,
    "lfm2_vl": LFM2_MARKS, "internvl": INTERNVL_MARKS, "glm4v": GLM_MARKS,
}  # fmt: skip


def kind_of(model_type: str) -> str:
    """`smolvlm`, `mistral3`, `gemma3`, `gemma4`, `lfm2_vl`, `internvl`, `qwen` or `glm4v`."""
    return next((family for family in ("qwen", "glm4v") if model_type.startswith(family)), model_type)


def _smolvlm() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    text = {"model_type": "llama", "vocab_size": 256 + len(MARKS), **TEXT}
    config = SmolVLMConfig(text_config=text, vision_config=VISION, scale_factor=MERGE, image_token_id=IMAGE)
    prepared = {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": TILE}}
    model = SmolVLMForConditionalGeneration(config).float().eval()
    return model, Idefics3ImageProcessorPil(**prepared), prepared | {"do_image_splitting": True, "resample": 1}


def _mistral3() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    text = {"model_type": "mistral", "vocab_size": 256 + len(MISTRAL_MARKS), "sliding_window": None, **TEXT}
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

    text = {"vocab_size": 256 + len(GEMMA3_MARKS), **TEXT, "pad_token_id": 0, "sliding_window": 24}
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

    text = {"model_type": "qwen2", "vocab_size": 256 + len(INTERNVL_MARKS), **TEXT}
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

    text = {"model_type": "lfm2", "vocab_size": 256 + len(LFM2_MARKS), **TEXT, "norm_eps": 1e-5, "pad_token_id": 0}
    text |= {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    vision = {"model_type": "siglip2_vision_model", "vision_use_head": False, **VISION, **_LFM2_POSITIONS}
    del vision["image_size"]
    config = Lfm2VlConfig(
        text_config=text, vision_config=vision, downsample_factor=MERGE, projector_hidden_size=40, image_token_id=IMAGE
    )
    return Lfm2VlForConditionalGeneration(config).float().eval(), None, LFM2_PREPARED | {"resample": 2}


_LFM2_POSITIONS = {"num_patches": 49}


def _gemma4(text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    own = {"vocab_size": 256 + len(GEMMA4_MARKS), "sliding_window": 24, "global_head_dim": 32, "num_hidden_layers": 4}
    own |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0}
    sizes = {"num_key_value_heads": 3, "head_dim": 16, "position_embedding_size": 1024}
    config = Gemma4Config(
        text_config={**TEXT, **own, **text}, vision_config={**VISION, **sizes, **vision}, audio_config=None,
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
_GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip


def _qwen(family: str, text: dict[str, Any], vision: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {"vocab_size": 256 + len(QWEN_MARKS), "rope_parameters": _ROPE, **TEXT, **text}
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "depth": 2, "num_heads": 3, "patch_size": PATCH,
        "out_hidden_size": TEXT["hidden_size"], **vision,
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


def _glm(family: str, text: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    import transformers
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    text = {"vocab_size": 256 + len(GLM_MARKS), "rope_parameters": rope, **TEXT, **text}
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "depth": 2, "num_heads": 3, "image_size": TILE, "patch_size": PATCH,
        "out_hidden_size": TEXT["hidden_size"],
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, image_token_id=IMAGE)
    prepared = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE}
    prepared |= {"size": {"shortest_edge": 512, "longest_edge": 4096}}  # of two frames
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return model.float().eval(), Glm4vImageProcessorPil(**prepared), prepared


_LEARNED = {"num_position_embeddings": (TILE // PATCH) ** 2}
_TAKEN = _LEARNED | {"deepstack_visual_indexes": [0, 1]}
_WINDOWS = {"window_size": 24, "fullatt_block_indexes": [1]}  # of 6 x 6 patches
_IN_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
KINDS: dict[str, partial[tuple[Any, Any, dict[str, Any]]]] = {
    "smolvlm": partial(_smolvlm),
    "mistral3": partial(_mistral3),
    "gemma3": partial(_gemma3),
    "lfm2_vl": partial(_lfm2_vl),
    "internvl": partial(_internvl),
    "gemma4": partial(_gemma4, _LIKE_31B, {"standardize": True}),
    "gemma4_e": partial(_gemma4, _LIKE_E2B, _CLIPPED),
    "glm4v": partial(_glm, "Glm4v", {}),
    "glm4v_moe": partial(_glm, "Glm4vMoe", _GLM_EXPERTS),
    "qwen3_vl": partial(_qwen, "Qwen3VL", {}, _TAKEN),
    "qwen3_vl_moe": partial(_qwen, "Qwen3VLMoe", _EXPERTS, _TAKEN),
    "qwen3_5": partial(_qwen, "Qwen3_5", _DELTA, _LEARNED),
    "qwen2_5_vl": partial(_qwen, "Qwen2_5_VL", {"rope_parameters": _IN_SECTIONS}, _WINDOWS),
}
