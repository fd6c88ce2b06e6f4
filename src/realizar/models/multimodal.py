"""The text model inside a multi-modal safetensors checkpoint. Standard library only.

Tensors of vision and sound are known and not needed here: a `Tower` has those of vision, where its kind is known.
"""

from __future__ import annotations

from realizar.models.hyper_parameters import HyperParameters
from realizar.models.tensor_names import is_unneeded

_TEXT_PREFIXES = (
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("model.text_model.", ""),
)
_OTHER_PARTS = (
    "audio_tower.",
    "connector.",
    "embed_audio.",
    "embed_vision.",
    "multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "visual.",
)
_OTHER_PREFIXES = (*_OTHER_PARTS, *(f"model.{part}" for part in _OTHER_PARTS))


def text_prefix(hparams: HyperParameters) -> tuple[str, str]:
    """The prefixes of the text model's tensors, in place of `model.` and before `lm_head`."""
    for prefix in _TEXT_PREFIXES:
        if f"{prefix[0]}embed_tokens.weight" in hparams.checkpoint.tensors:
            return prefix
    return ("model.", "")


def is_other_part(name: str) -> bool:
    return is_unneeded(name) or name.startswith(_OTHER_PREFIXES)
