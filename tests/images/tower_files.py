"""Towers of `vision_models` as llama.cpp's converters have them in GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from images.vision_kinds import MERGE, PATCH, TILE, VISION
from images.vision_models import stored, tower_metadata
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf

_GGUF_NAMES = (
    ("model.vision_model.encoder.layers.", "v.blk."),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_out"),
    ("layer_norm1", "ln1"),
    ("layer_norm2", "ln2"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("model.vision_model.embeddings.patch_embedding", "v.patch_embd"),
    ("model.vision_model.embeddings.position_embedding", "v.position_embd"),
    ("model.vision_model.post_layernorm", "v.post_ln"),
    ("model.connector.modality_projection.proj", "mm.model.fc"),
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.transformer.layers.", "v.blk."),
    ("attention.o_proj", "attn_out"),
    ("attention_norm", "ln1"),
    ("ffn_norm", "ln2"),
    *((f"attention.{name}_proj", f"attn_{name}") for name in "qkv"),
    *((f"feed_forward.{name}_proj", f"ffn_{name}") for name in ("gate", "up", "down")),
    ("visual.blocks.", "v.blk."),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    (".norm1", ".ln1"),
    (".norm2", ".ln2"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("visual.patch_embed.proj", "v.patch_embd"),
    ("visual.pos_embed", "v.position_embd"),
    ("visual.post_conv_layernorm", "v.norm_embd"),
    ("visual.embeddings.position_embedding", "v.position_embd"),
    ("visual.post_layernorm", "v.post_ln"),
    ("visual.downsample", "mm.patch_merger"),
    ("visual.merger.proj.", "mm.model.fc."),
    ("visual.merger.post_projection_norm", "mm.post_norm"),
    *((f"visual.merger.{name}_proj", f"mm.{name}") for name in ("gate", "up", "down")),
    ("visual.merger.norm", "v.post_ln"),
    ("visual.merger.ln_q", "v.post_ln"),
    ("visual.merger.mlp", "mm"),
    *((f"mlp.{name}_proj", f"ffn_{name}") for name in ("gate", "up", "down")),
    ("visual.merger.linear_fc1", "mm.0"),
    ("visual.merger.linear_fc2", "mm.2"),
    ("visual.deepstack_merger_list.", "v.deepstack."),
    (".linear_fc", ".fc"),
    ("vision_tower.encoder.layer.", "v.blk."),
    *((f"attention.{name}_proj", f"attn_{name}") for name in "qkv"),
    ("attention.projection_layer", "attn_out"),
    ("layernorm_before", "ln1"),
    ("layernorm_after", "ln2"),
    *((f"lambda_{number}", f"ls{number}.weight") for number in (1, 2)),
    ("vision_tower.embeddings.cls_token", "v.class_embd"),
    ("vision_tower.embeddings.position_embeddings", "v.position_embd.weight"),
    ("vision_tower.embeddings.patch_embeddings.projection", "v.patch_embd"),
    ("vision_tower.patch_conv", "v.patch_embd"),
    ("vision_tower.ln_pre", "v.pre_ln"),
    (".linear.", "."),
    ("q_norm", "attn_q_norm"),
    ("k_norm", "attn_k_norm"),
    ("self_attn.attn_", "attn_"),
    ("self_attn.o_proj", "attn_out"),
    *((f"mlp.{name}_proj", f"ffn_{name}") for name in ("gate", "up", "down")),
    ("input_layernorm", "ln1"),
    ("post_attention_layernorm", "attn_post_norm"),
    ("pre_feedforward_layernorm", "ln2"),
    ("post_feedforward_layernorm", "ffn_post_norm"),
    ("vision_tower.patch_embedder.input_proj", "v.patch_embd"),
    ("vision_tower.patch_embedder.position_embedding_table", "v.position_embd.weight"),
    ("vision_tower.std_", "v.std_"),
    ("model.embed_vision.embedding_projection", "mm.input_projection"),
    ("vision_tower.encoder.layers.", "v.blk."),
    ("vision_tower.embeddings.patch_embedding", "v.patch_embd"),
    ("vision_tower.embeddings.position_embedding", "v.position_embd"),
    ("vision_tower.post_layernorm", "v.post_ln"),
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
    ("multi_modal_projector.norm", "mm.input_norm"),
    ("multi_modal_projector.layer_norm", "mm.input_norm"),
    ("multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger"),
    ("multi_modal_projector.linear_", "mm."),
)


def write_tower_file(
    checkpoint: Checkpoint, path: Path, *, swapped: bool = False, kind: GGMLType = GGMLType.F32
) -> None:
    """Write the tower of a folder's checkpoint as a GGUF file, with the older names of feed-forwards if `swapped`, and
    its matrices of a `kind` as those of `write_vision_files`.
    """
    architecture, tensors = checkpoint.architecture, []
    for own, tensor in checkpoint.tensors.items():
        if not own.startswith(_GGUF_STARTS):
            continue
        name = own.removeprefix("model.") if own.startswith(_OF_NEWER) else own
        for old, new in _GGUF_NAMES:
            name = name.replace(old, new)
        if swapped and "ffn_" in name:
            name = name.replace("ffn_up", "x").replace("ffn_down", "ffn_up").replace("x", "ffn_down")
        values = tensor.data.view(np.float32).reshape(tensor.shape or 1)
        for suffixed, each in _converted(architecture, name, values):
            tensors.append(stored(suffixed, np.ascontiguousarray(each), GGMLType.F32 if "embd" in suffixed else kind))
    if architecture == "gemma4":
        row = np.ones(64, np.float32)
        tensors += [NewTensor(name, GGMLType.F32, row.shape, row.view(np.uint8)) for name in _OF_SOUND]
    if architecture == "mistral3":
        row = np.ones(64, np.float32)
        tensors.append(NewTensor("v.token_embd.img_break", GGMLType.F32, row.shape, row.view(np.uint8)))
    vision = {**VISION, **checkpoint.metadata["config"]["vision_config"]}
    sizes = {"embedding_length": vision["hidden_size"], "feed_forward_length": vision["intermediate_size"]}
    of_gemma4 = {f"clip.vision.{key}": size for key, size in sizes.items()} if architecture == "gemma4" else {}
    write_gguf(path, _converted_metadata(architecture) | of_gemma4, tensors)


_Values = np.ndarray[Any, np.dtype[np.float32]]


def _converted(architecture: str, name: str, values: _Values) -> Iterator[tuple[str, _Values]]:
    """A tensor as llama.cpp's converter has it, by its names."""
    if architecture == "internvl" and name.startswith(("v.class_embd", "v.position_embd")):
        yield name, values[0, 0] if name == "v.class_embd" else values[0]
    elif architecture == "internvl" and name.startswith("mm."):
        numbers = {"input_norm": "0", "1": "1", "2": "3"}
        yield ".".join(("mm", numbers[name.split(".")[1]], name.rpartition(".")[2])), values
    elif architecture == "mistral3" and name.endswith(("attn_q.weight", "attn_k.weight")):  # pairs become neighbours
        yield name, values.reshape(3, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    elif name == "mm.soft_emb_norm.weight":
        yield name, values + 1
    elif architecture in ("lfm2_vl", "gemma4") and name == "v.patch_embd.weight":
        yield name, values.reshape(-1, PATCH, PATCH, 3).transpose(0, 3, 1, 2)
    elif architecture == "qwen2_5_vl" and "attn_qkv" in name:
        yield from ((name.replace("qkv", part), each) for part, each in zip("qkv", np.split(values, 3), strict=True))
    elif name == "v.patch_embd.weight" and values.ndim == 5:
        yield from ((f"{name}{suffix}", values[:, :, frame]) for frame, suffix in enumerate(("", ".1")))
    else:
        yield name, values


def _converted_metadata(architecture: str) -> dict[str, Any]:
    of_smolvlm = tower_metadata(48, 2, 3, 80, 64)
    if architecture in ("smolvlm", "idefics3"):
        return of_smolvlm
    of_all = {key: value for key, value in of_smolvlm.items() if key not in _OF_TILES}
    vision: dict[str, Any]
    activation = {}
    if architecture == "gemma3":
        projector, vision = "gemma3", {"projector.scale_factor": MERGE}
    elif architecture == "internvl":
        projector, vision = "internvl", {"projector.scale_factor": MERGE, "preproc_max_tiles": 4, **_COLOURS}
    elif architecture == "lfm2_vl":
        projector, vision = "lfm2", {"image_size": 7 * PATCH, "preproc_image_size": TILE, "preproc_max_tiles": 4}
        vision |= {"image_min_pixels": 256, "image_max_pixels": 1024, "projector.scale_factor": MERGE}
    elif architecture == "gemma4":
        of_all = {key: each for key, each in of_all.items() if key not in ("clip.use_gelu", "clip.projector_type")}
        projector, vision = None, {"projector_type": "gemma4v", "image_size": 224}
        vision |= {"image_mean": np.zeros(3, np.float32), "image_std": np.ones(3, np.float32)}
        activation = {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"}
        activation |= {"clip.audio.embedding_length": 64}
    elif architecture == "mistral3":
        projector, vision = "pixtral", {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 24, **_COLOURS}
        vision |= {"spatial_merge_size": MERGE}
    elif architecture.startswith("glm4v"):
        projector, vision = "glm4v", {"attention.layer_norm_epsilon": 1e-5, **_COLOURS}
        activation = {"clip.use_gelu": False, "clip.use_silu": True}
    else:
        vision = {"image_min_pixels": 256, "image_max_pixels": 2048, "spatial_merge_size": MERGE}
        if architecture == "qwen2_5_vl":
            projector, activation = "qwen2.5vl_merger", {"clip.use_gelu": False, "clip.use_silu": True}
            vision |= {"n_wa_pattern": 2, "window_size": 24, **_COLOURS}
        else:
            projector = "qwen3vl_merger"
            vision |= {"is_deepstack_layers": np.array(["vl" in architecture] * 2)}
    own = {f"clip.vision.{key}": value for key, value in vision.items()}
    of_projector = {} if projector is None else {"clip.projector_type": projector}
    return of_all | of_projector | activation | own


_OF_TILES = ("clip.vision.projector.scale_factor", "clip.vision.preproc_image_size")
_OF_NEWER = ("model.vision_tower.", "model.multi_modal_projector.", "model.visual.")
_GGUF_STARTS = (
    *("model.vision_model.", "model.connector.", "vision_tower.", "multi_modal_projector.", "visual."),
    *("model.embed_vision.", *_OF_NEWER),
)
_COLOURS = {
    "image_mean": np.array([0.48145466, 0.4578275, 0.40821073], np.float32),
    "image_std": np.array([0.26862954, 0.26130258, 0.27577711], np.float32),
}
_OF_SOUND = ("a.blk.0.ln1.weight", "mm.a.input_projection.weight")
