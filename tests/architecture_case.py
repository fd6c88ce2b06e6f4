"""`Case`: a row of the tables of architectures. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Form = Literal["safetensors", "gguf"]
DeviceKind = Literal["cpu", "cuda"]
FORMS: tuple[Form, ...] = ("safetensors", "gguf")


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        family: prefix of transformers' `...Config` and `...ForCausalLM`.
        options: of the configuration, beyond `_SIZES`.
        num_tokens: of the sequence, past every window and every original context.
        context_length: what the model is opened with; None for its own.
        forms: the checkpoints that can say it.
        run_by: backends that run it; the others refuse it by name.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 48
    context_length: int | None = None
    forms: tuple[Form, ...] = FORMS
    run_by: tuple[DeviceKind, ...] = field(default=("cpu", "cuda"), repr=False)  # `parity_rows` notes what `repr` shows

    @property
    def is_part(self) -> bool:
        """True if the text model is part of a multi-modal one, whose other part `vision_config` describes."""
        return "vision_config" in self.options

    @property
    def model_class(self) -> str:
        """Transformers' class of the model."""
        return f"{self.family}ForConditionalGeneration" if self.is_part else f"{self.family}ForCausalLM"
