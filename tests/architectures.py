"""Small models of random weights, one row per architecture and variant, as safetensors folders and F32 GGUF files.

Whatever computes logits is checked against transformers on them: see `check_logits`. Needs torch and transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from architecture_case import Case, DeviceKind, Form
from dense_architectures import DENSE
from models.hybrids.hybrid_architectures import HYBRIDS
from models.mixture_architectures import MIXTURES
from wider import wider

MAX_RELATIVE_ERROR = 1e-4

_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WIDE_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "partial_rotary_factor": 0.75,
}


_WIDE_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_WITH_TEXT_CONFIG = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
_ZERO_CENTRED = ("Gemma2", "Gemma3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")

CASES: dict[str, Case] = {
    "llama": Case("Llama"),
    "llama-biases-tied": Case(
        "Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}
    ),
    "llama-linear": Case("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}),
    "llama-llama3": Case(
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            }
        },
    ),
    "llama-yarn": Case(
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 1000.0,
                "beta_fast": 4.0,
            }
        },
    ),
    "mistral": Case("Mistral", {"sliding_window": 8, "head_dim": 24}),
    "qwen2": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": Case("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": Case(
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "qwen3moe-dense-layers": Case(
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        forms=("safetensors",),
    ),
    "olmoe": Case("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe-divided": Case(
        "Olmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        forms=("safetensors",),
    ),
    "lfm2": Case("Lfm2", {"full_attn_idxs": [1, 3]}),
    "lfm2-biases": Case(
        "Lfm2",
        {
            "full_attn_idxs": [2],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        forms=("safetensors",),
    ),
    "gemma2": Case(
        "Gemma2",
        {
            "sliding_window": 8,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Case(
        "Gemma3",
        {
            "sliding_window": 8,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3-caps": Case(
        "Gemma3",
        {
            "sliding_window": 8,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        forms=("safetensors",),
    ),
    "phi3": Case("Phi3", {"sliding_window": 8}),
    "phi3-short": Case("Phi3", {"rope_parameters": _LONGROPE}, num_tokens=16, context_length=16),
    "phi3-long": Case("Phi3", {"rope_parameters": _LONGROPE}),
    "granite": Case(
        "Granite",
        {
            "attention_bias": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": Case("Olmo2"),
    "starcoder2": Case("Starcoder2", {"sliding_window": 8}),
    "starcoder2-plain": Case(
        "Starcoder2", {"hidden_act": "gelu", "use_bias": False, "tie_word_embeddings": False}, forms=("safetensors",)
    ),
    "smollm3": Case("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-listed": Case(
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        forms=("safetensors",),
    ),
    **DENSE,
    **MIXTURES,
    **HYBRIDS,
}
ROWS = [(name, form) for name, case in CASES.items() for form in case.forms]


def rows_run_by(backend: DeviceKind) -> list[tuple[str, Form]]:
    """The rows that a backend runs."""
    return [(name, form) for name, form in ROWS if backend in CASES[name].run_by]


def rows_by_turns(turn: int) -> list[Any]:
    """Rows as parameters, one form of each case each time: 0 for the CPU backend, 1 for the reference model.

    The other turn takes the other form of each family's first case; `--full` runs all rows in both.
    """
    chosen, families = set(), set()
    for number, (name, case) in enumerate(CASES.items()):
        on_cpu = case.forms[number % len(case.forms)] if "cpu" in case.run_by else None
        if turn == 0:
            chosen.add((name, on_cpu))
        elif on_cpu is None or case.family not in families:
            chosen |= {(name, form) for form in case.forms if form != on_cpu}
        families.add(case.family)
    rows = rows_run_by("cpu") if turn == 0 else ROWS
    return wider(rows, *(row for row in rows if row in chosen))


class BuiltCase(NamedTuple):
    """A case on disk: the checkpoint, transformers' model, the tokens, and the context length to open it with."""

    path: Path
    model: Any
    token_ids: list[int]
    context_length: int | None


def build_case(name: str, folder: Path, form: Form) -> BuiltCase:
    """Make the model of a row, the same for both forms, and write it below `folder`."""
    case = CASES[name]
    model = make_model(name)
    path = folder / name
    if form == "gguf":
        from gguf_conversion import convert_to_gguf

        path = path.with_suffix(".gguf")
        convert_to_gguf(model, path)
    else:
        model.save_pretrained(path)
    rng = np.random.default_rng(7)
    token_ids = rng.integers(0, _SIZES["vocab_size"], case.num_tokens).tolist()
    return BuiltCase(path, model, token_ids, case.context_length)


@functools.cache
def make_model(name: str, wide: bool = False) -> Any:
    """Transformers' model in float32, with weights large enough for positions, windows and caps to matter.

    A wide one has in_features of whole blocks of 256 and a context of 1,024 tokens.
    """
    import torch
    import transformers

    case = CASES[name]
    options = {**_SIZES, **{key: _copied(value) for key, value in case.options.items()}}
    if wide:
        options |= {key: 256 for key in options if key.endswith("intermediate_size")} | _WIDE_SIZES
        options |= {key: value for key, value in _WIDE_DELTA.items() if key in options}
    # Phi-3's configuration looks for this one at its top level first.
    if "original_max_position_embeddings" in options.get("rope_parameters", {}) and case.family == "Phi3":
        options["original_max_position_embeddings"] = options["rope_parameters"]["original_max_position_embeddings"]
    is_text = case.family in _WITH_TEXT_CONFIG and not case.is_part
    config_class = f"{case.family}TextConfig" if is_text else f"{case.family}Config"
    if case.is_part:
        vision = options.pop("vision_config")
        options = {"text_config": options, "vision_config": vision}
        options["tie_word_embeddings"] = options["text_config"].get("tie_word_embeddings", False)
    config = getattr(transformers, config_class)(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model_class)(config).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for path, buffer in model.named_buffers():
            if path.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                width = 1.0 if "embed_tokens" in path else parameter.shape[-1] ** 0.5
                parameter.copy_(noise / width)
            else:
                is_zero = path.endswith(("bias", "sinks")) or (
                    case.family in _ZERO_CENTRED and "linear_attn.norm" not in path
                )
                centre = -2.0 if path.endswith("A_log") else 0.0 if is_zero else 1.0
                if case.family == "Gemma4" and path.endswith("q_norm.weight"):
                    centre = 0.3  # stands for the scale of attention
                parameter.copy_(centre + 0.2 * noise)
        for path, buffer in model.named_buffers():
            if path.endswith("layer_scalar"):
                buffer.copy_(0.75 + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def expected_logits(built: BuiltCase) -> NDArray[np.float32]:
    """float32 [tokens, vocab_size] by transformers."""
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = built.model(torch.tensor([built.token_ids]), use_cache=False).logits[0].numpy()
    return logits


def check_logits(built: BuiltCase, logits: Callable[[Sequence[int]], NDArray[Any]]) -> None:
    """Compare `logits(token_ids)` [tokens, vocab_size] with transformers': norm of the error over norm, by token."""
    expected = expected_logits(built)
    found = logits(built.token_ids)
    assert found.shape == expected.shape
    error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= MAX_RELATIVE_ERROR, f"relative error {error.max():.2e} at token {error.argmax()}"


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, dict) else value
