"""Whatever stands under a hyper-parameter's key, building a spec gives a spec or an error of ours."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from handmade_checkpoint import CONFIG, GGUF_METADATA, config_checkpoint, gguf_checkpoint
from realizar.errors import RealizarError
from realizar.models import registry
from realizar.models.spec import ModelSpec

GGUF_KEYS = [key.removeprefix("llama.") for key in GGUF_METADATA if key.startswith("llama.")] + [
    "attention.key_length",
    "attention.value_length",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.layer_norm_epsilon",
    "attn_logit_softcapping",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_log_multiplier",
    "rope.dimension_sections",
    "attention.temperature_scale",
    "n_deepstack_layers",
    "attention.key_length_swa",
    "attention.shared_kv_layers",
    "embedding_length_per_layer_input",
    "rope.dimension_count_swa",
    "logit_scale",
    "embedding_scale",
    "final_logit_softcapping",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "expert_gating_func",
    "expert_weights_scale",
    "leading_dense_block_count",
    "interleave_moe_layer_step",
    "nextn_predict_layers",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "attention.recurrent_layers",
    "full_attention_interval",
]
CONFIG_KEYS = [key for key in CONFIG if key != "model_type"] + [
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "full_attention_interval",
    "attn_output_gate",
    "mtp_num_hidden_layers",
    "head_dim",
    "layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "sliding_window",
    "sliding_window_pattern",
    "attention_k_eq_v",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "use_sliding_window",
    "query_pre_attn_scalar",
    "norm_epsilon",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "experts_per_token",
    "swiglu_limit",
    "n_routed_experts",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "moe_num_experts",
    "moe_k",
    "moe_layer_end_index",
    "rotary_dim",
    "attn_type_list",
    "mlp_only_layers",
    "decoder_sparse_step",
    "conv_L_cache",
    "full_attn_idxs",
    "block_ff_dim",
    "block_multiple_of",
    "block_ffn_dim_multiplier",
    "theta",
    "no_rope_layers",
    "no_rope_layer_interval",
    "text_config",
    "quantization_config",
]
ROPE_KEYS = (
    "factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mrope_section",
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(0, 64), st.floats(), st.text(max_size=4)
)
ropes = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope", "other"])},
    optional=dict.fromkeys((*ROPE_KEYS, "original_max_position_embeddings", "short_factor"), scalars),
)
values = st.one_of(scalars, st.lists(scalars, max_size=4), ropes)
arrays = st.builds(
    np.asarray, st.lists(st.integers(-1, 8), max_size=3), st.sampled_from([np.int32, np.float32, np.bool_])
)
kinds = st.sampled_from(["none", "linear", "yarn", "longrope"])


def _build(checkpoint: Any) -> None:
    with contextlib.suppress(RealizarError):
        assert isinstance(registry.build_spec(checkpoint), ModelSpec)


@given(
    st.sampled_from(sorted(registry._BY_GGUF_ARCHITECTURE)),
    st.dictionaries(st.sampled_from(GGUF_KEYS), st.one_of(values, kinds, arrays), max_size=4),
)
def test_gguf_metadata(architecture: str, changes: dict[str, Any]) -> None:
    keys = {f"{architecture}.{key}": value for key, value in changes.items()}
    _build(gguf_checkpoint(keys, architecture))


@given(
    st.sampled_from(sorted(registry._BY_MODEL_TYPE)),
    st.dictionaries(st.sampled_from(CONFIG_KEYS), values, max_size=4),
)
def test_config_json(model_type: str, changes: dict[str, Any]) -> None:
    _build(config_checkpoint({"model_type": model_type, **changes}))
