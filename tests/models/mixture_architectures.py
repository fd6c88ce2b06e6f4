"""Rows of mixtures of experts; see `architectures.py`. The CPU runs them."""

from __future__ import annotations

from architecture_case import Case

MIXTURES: dict[str, Case] = {
    "gpt-oss": Case(
        "GptOss",
        {
            "head_dim": 32,
            "num_hidden_layers": 5,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "max_position_embeddings": 640,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 32.0,
                "beta_fast": 2.0,
                "beta_slow": 0.5,
                "truncate": False,
                "original_max_position_embeddings": 20,
            },
        },
        num_tokens=600,
        run_by=("cpu",),
    ),
}
