"""The table of architectures: `build_spec` calls the file of a checkpoint's architecture. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.hf_config import refuse_remote_code
from realizar.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from realizar.models.architectures import (
    arcee,
    ernie,
    exaone4,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    minimax,
    mistral3,
    olmo2,
    olmoe,
    phi3,
    qwen,
    qwen_hybrid,
    qwen_moe,
    seed_oss,
    smollm3,
    starcoder2,
)
from realizar.models.drafters.assistant import is_assistant
from realizar.models.drafters.dflash import is_dflash
from realizar.models.drafters.eagle3 import is_eagle3
from realizar.models.hyper_parameters import HyperParameters, config_path
from realizar.models.multimodal import is_other_part
from realizar.models.next_token import has_next_token_block
from realizar.models.ranking import is_classifier, ranking_tensors
from realizar.models.spec import ModelSpec
from realizar.models.tensor_names import is_unneeded
from realizar.models.tower import Tower
from realizar.models.towers import gemma4v, pixtral, qwen_vl, siglip
from realizar.quantization.tensors import matrix_format

BuildSpec = Callable[[HyperParameters], ModelSpec]

_ARCHITECTURES: tuple[tuple[BuildSpec, str | None, tuple[str, ...]], ...] = (
    (llama.build, "llama", ("llama", "mistral", "mixtral")),
    (partial(llama.build, is_part=True), None, ("idefics3", "smolvlm")),
    (arcee.build, "arcee", ("arcee",)),
    (partial(qwen.build, qk_norm=False), "qwen2", ("qwen2",)),
    (partial(qwen.build, qk_norm=True), "qwen3", ("qwen3",)),
    (partial(qwen.build, qk_norm=False, is_part=True), "qwen2vl", ("qwen2_vl", "qwen2_5_vl")),
    (partial(qwen.build, qk_norm=True, is_part=True), "qwen3vl", ("qwen3_vl",)),
    (qwen.build_internvl, None, ("internvl",)),
    (qwen_moe.build_qwen2, "qwen2moe", ("qwen2_moe",)),
    (qwen_moe.build_qwen3, "qwen3moe", ("qwen3_moe",)),
    (qwen_moe.build_qwen3vl, "qwen3vlmoe", ("qwen3_vl_moe",)),
    (qwen_hybrid.build_qwen35, "qwen35", ("qwen3_5", "qwen3_5_text")),
    (qwen_hybrid.build_qwen35_mixture, "qwen35moe", ("qwen3_5_moe", "qwen3_5_moe_text")),
    (qwen_hybrid.build_qwen3_next, "qwen3next", ("qwen3_next",)),
    (lfm2.build, "lfm2", ("lfm2",)),
    (partial(lfm2.build, is_part=True), None, ("lfm2_vl", "lfm2-vl")),
    (lfm2.build_mixture, "lfm2moe", ("lfm2_moe",)),
    (gemma.build_gemma2, "gemma2", ("gemma2",)),
    (gemma.build_gemma3, "gemma3", ("gemma3", "gemma3_text")),
    (gemma4.build, "gemma4", ("gemma4", "gemma4_text")),
    (phi3.build, "phi3", ("phi3",)),
    (granite.build, "granite", ("granite",)),
    (granite.build_mixture, "granitemoe", ("granitemoe", "granitemoeshared")),
    (olmo2.build_olmo2, "olmo2", ("olmo2",)),
    (olmo2.build_olmo3, None, ("olmo3",)),
    (olmoe.build, "olmoe", ("olmoe",)),
    (starcoder2.build, "starcoder2", ("starcoder2",)),
    (smollm3.build, "smollm3", ("smollm3",)),
    (seed_oss.build, "seed_oss", ("seed_oss",)),
    (exaone4.build, "exaone4", ("exaone4",)),
    (ernie.build, "ernie4_5", ("ernie4_5",)),
    (ernie.build_mixture, "ernie4_5-moe", ("ernie4_5_moe",)),
    (mistral3.build, "mistral3", ("mistral3", "ministral3")),
    (glm.build, "glm4", ("glm4",)),
    (partial(glm.build, is_part=True), None, ("glm4v",)),
    (glm.build_mixture, "glm4moe", ("glm4_moe",)),
    (partial(glm.build_mixture, is_part=True), None, ("glm4v_moe",)),
    (gpt_oss.build, "gpt-oss", ("gpt_oss",)),
    (minimax.build_m2, "minimax-m2", ("minimax_m2",)),
)
"""What builds a model, its name in GGUF files, and the values of `model_type` in `config.json`."""
_TOWERS: tuple[tuple[Callable[[Checkpoint], Tower], str, tuple[str, ...]], ...] = (
    (siglip.build_idefics3, "idefics3", ("idefics3", "smolvlm")),
    (siglip.build_gemma3, "gemma3", ("gemma3",)),
    (gemma4v.build, "gemma4v", ("gemma4",)),
    (siglip.build_internvl, "internvl", ("internvl",)),
    (siglip.build_lfm2, "lfm2", ("lfm2_vl", "lfm2-vl")),
    (pixtral.build, "pixtral", ("mistral3",)),
    (qwen_vl.build_glm, "glm4v", ("glm4v", "glm4v_moe")),
    (qwen_vl.build_qwen25, "qwen2.5vl_merger", ("qwen2_5_vl",)),
    (qwen_vl.build_qwen3, "qwen3vl_merger", ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")),
)
"""What builds a tower, the name of its projector in GGUF files, and the values of `model_type` in `config.json`."""
_TOWERS_OF_OTHERS = {"kimivl": "Kimi-VL", "kimik25": "Kimi K2.5"}
"""Projectors in GGUF files, and models that are the only ones with them, whose text model is not read."""
_BY_GGUF_ARCHITECTURE = {name: build for build, name, _ in _ARCHITECTURES if name is not None}
_BY_MODEL_TYPE = {name: build for build, _, names in _ARCHITECTURES for name in names}
_TOWER_ARCHITECTURE = "clip"
"""`general.architecture` of GGUF files that hold an encoder of images, and no text model."""
_TIED = "tie_word_embeddings"


def build_spec(
    checkpoint: Checkpoint, context_length: int | None = None, expert_used_count: int | None = None
) -> ModelSpec:
    """Describe the model of a checkpoint.

    Args:
        context_length: tokens a request may hold; None takes the model's. Longrope chooses its factors by it.
        expert_used_count: experts that a token goes through in each mixture; None takes the model's.

    Raises:
        UnsupportedModelError: unknown architecture, a key value that this program can't honour, or no weights.
        CheckpointError: a hyper-parameter is missing, of the wrong type, or absurd.
        InvalidRequestError: `context_length` exceeds the model's, or `expert_used_count` its experts.
    """
    build, hparams = _find_build(checkpoint, context_length, expert_used_count)
    spec = build(hparams)
    if expert_used_count is not None and not spec.mixtures():
        raise InvalidRequestError(f"expert_used_count: {checkpoint.path} has no experts", "expert_used_count")
    return replace(spec, ignored_tensors=spec.ignored_tensors | ranking_tensors(checkpoint))


def build_next_token_block(checkpoint: Checkpoint, context_length: int | None = None) -> ModelSpec | None:
    """Describe the block of a checkpoint that drafts the next tokens; None where it has none that is known.

    Arguments and errors are those of `build_spec`.
    """
    if not has_next_token_block(checkpoint):
        return None
    build, hparams = _find_build(checkpoint, context_length, None)
    hparams.drafts = True
    spec = build(hparams)
    return None if spec.next_token is None else spec


def _find_build(
    checkpoint: Checkpoint, context_length: int | None, expert_used_count: int | None
) -> tuple[BuildSpec, HyperParameters]:
    if is_eagle3(checkpoint) or is_dflash(checkpoint) or is_assistant(checkpoint):
        raise UnsupportedModelError(f"{checkpoint.path}: it drafts for another model, as --drafter, and runs beside it")
    if checkpoint.format == "gguf":
        name, build = _find_gguf_build(checkpoint)
        hparams = HyperParameters(checkpoint, name, None, context_length, expert_used_count)
    else:
        config = checkpoint.metadata.get("config")
        if not isinstance(config, Mapping):
            raise CheckpointError(config_path(checkpoint), "offset 0", "missing, or not an object")
        refuse_remote_code(config, _BY_MODEL_TYPE.keys())
        name, build = _find_config_build(checkpoint, config)
        if is_classifier(checkpoint):
            config = {**config, _TIED: True}  # what it has for next tokens is the embedding, if anything
        hparams = HyperParameters(checkpoint, name, _text_config(config), context_length, expert_used_count)
        matrix_format(checkpoint)  # refuses a method of quantisation that nothing reads
        hparams.raw(None, "quantization_config")
    require_weights(checkpoint)
    return build, hparams


def build_tower(checkpoint: Checkpoint) -> Tower | None:
    """Describe the encoder of images of a safetensors model, or of a GGUF file of one (`mmproj`); None without one.

    Raises:
        UnsupportedModelError: an unknown projector, or a key value that this program can't honour.
        CheckpointError: a hyper-parameter is missing, of the wrong type, or absurd.
    """
    if checkpoint.format == "gguf":
        if checkpoint.architecture != _TOWER_ARCHITECTURE:
            return None
        keys = ("clip.projector_type", "clip.vision.projector_type")
        name = next((checkpoint.metadata[key] for key in keys if checkpoint.metadata.get(key)), None)
        found = next((build for build, projector, _ in _TOWERS if projector == name), None)
        if name in _TOWERS_OF_OTHERS:
            model = f"{_TOWERS_OF_OTHERS[name]}, whose text model (deepseek2) is not supported"
            raise UnsupportedModelError(f"{checkpoint.path}: projector {name!r} is of {model}")
        if found is None:
            known = ", ".join(projector for _, projector, _ in _TOWERS)
            raise UnsupportedModelError(f"{checkpoint.path}: unknown projector {name!r:.80} (known: {known})")
        return found(checkpoint)
    found = next((build for build, _, names in _TOWERS if checkpoint.architecture in names), None)
    has_any = any(is_other_part(name) and not is_unneeded(name) for name in checkpoint.tensors)
    return None if found is None or not has_any else found(checkpoint)


def require_weights(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError for a file that holds only a vocabulary."""
    if not checkpoint.tensors:
        raise UnsupportedModelError(f"{checkpoint.path}: no weights")


def _find_gguf_build(checkpoint: Checkpoint) -> tuple[str, BuildSpec]:
    name = checkpoint.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(checkpoint.path, "key 'general.architecture'", "missing, or not a text")
    return name, _choose(checkpoint, name, _BY_GGUF_ARCHITECTURE)


def _find_config_build(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[str, BuildSpec]:
    name = config.get("model_type")
    if name is None:
        classes = config.get("architectures")
        first = classes[0] if isinstance(classes, list) and classes else None
        name = model_type_of(first) if isinstance(first, str) else None
    if not isinstance(name, str):
        raise CheckpointError(config_path(checkpoint), "key 'model_type'", "missing, or not a text")
    return name, _choose(checkpoint, name, _BY_MODEL_TYPE)


def model_type_of(class_name: str) -> str:
    """The `model_type` that a class of transformers is named after; its own name where that is unknown.

    `ForCausalLM` is of the text model alone where a multi-modal one has a class too.
    """
    stem, _, kind = class_name.lower().partition("for")
    known = {name.replace("_", ""): name for name in _BY_MODEL_TYPE}
    stem = stem.replace("_", "")
    if kind == "causallm":
        return known.get(f"{stem}text") or known.get(stem, class_name)
    return known.get(stem, class_name) if kind == "conditionalgeneration" else class_name


def _choose(checkpoint: Checkpoint, name: str, builds: Mapping[str, BuildSpec]) -> BuildSpec:
    if name not in builds:
        known, near = ", ".join(sorted(builds)), get_close_matches(name, builds, 1)
        nearest = f", the nearest known one is '{near[0]}'" if near else ""
        raise UnsupportedModelError(f"{checkpoint.path}: unknown architecture '{name}'{nearest} (known: {known})")
    return builds[name]


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multi-modal configuration that describes the text model. Its head is tied if either part says so:
    which of them counts differs between families and versions of transformers, and the other may have a default there.
    A head that the checkpoint has all the same is seen by its values.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    shared = {key: config[key] for key in (_TIED, "quantization_config") if key in config}
    text = {**shared, **inner}
    if shared.get(_TIED) is True or text.get(_TIED) is None:
        text[_TIED] = shared.get(_TIED)
    return text
