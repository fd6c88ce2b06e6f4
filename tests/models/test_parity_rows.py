"""An architecture that was never compared with transformers does not look green, with or without torch."""

from __future__ import annotations

from architectures import CASES, ROWS
from models.gguf_experts import MIXTURES
from models.hybrids.gguf_hybrids import HYBRIDS
from models.parity_rows import STORED_ROWS, digest, recorded
from realizar.models import registry

FORMS_OF_FAMILIES = [(registry.model_type_of(case.model_class), case.forms) for case in CASES.values()]
IN_GGUF = {"mistral": "llama", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "olmo3": "olmo2"} | {
    "ministral3": "mistral3",
    "glm4v": "glm4",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    **MIXTURES,
    **HYBRIDS,
}
# A multi-modal configuration around the other's.
WRAPPERS = {
    **{name: f"{name}_text" for name in ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")},
    **dict.fromkeys(("smolvlm", "idefics3"), "llama"),
    **dict.fromkeys(("lfm2_vl", "lfm2-vl"), "lfm2"),
    "internvl": "qwen2",
}


def test_every_architecture_has_a_row() -> None:
    folders = {
        WRAPPERS.get(model_type, model_type) for model_type, forms in FORMS_OF_FAMILIES if "safetensors" in forms
    }
    assert {WRAPPERS.get(name, name) for name in registry._BY_MODEL_TYPE} == folders
    files = {IN_GGUF.get(model_type, model_type) for model_type, forms in FORMS_OF_FAMILIES if "gguf" in forms}
    assert set(registry._BY_GGUF_ARCHITECTURE) == files


def test_every_row_was_compared_with_transformers() -> None:
    compared = recorded()
    rows: list[tuple[str, str]] = [*ROWS, *STORED_ROWS]
    left = [f"{name} {form}" for name, form in rows if compared.get(f"{name} {form}") != digest(name, form)]
    assert not left, (
        f"never compared with transformers as they stand: {', '.join(left)}; run `make parity`, which installs torch"
        " and transformers, compares, and notes the rows that agree in tests/data/parity_rows.json"
    )
