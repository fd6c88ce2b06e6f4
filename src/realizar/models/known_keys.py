"""Keys of `config.json` and of GGUF files without effect on the result of a decoder. Standard library only.

The keys are from the published files of these architectures, and from the configuration classes of transformers. A key
that an architecture's file reads need not be here; an unknown key is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GGUF_WITHOUT_EFFECT = frozenset(
    {
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "classifier.output_labels",
        "decoder_start_token_id",
        "pooling_type",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
    }
)

_OF_THE_LIBRARY = """
    architectures auto_map attn_implementation chunk_size_feed_forward dtype finetuning_task framework id2label
    is_decoder label2id model_type name_or_path output_attentions output_hidden_states output_scores problem_type
    return_dict return_dict_in_generate task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version use_cache use_bfloat16 cache_implementation is_llama_config
    unsloth_fixed unsloth_fixed_mtp unsloth_version model_max_length tokenizer_model_max_length max_sequence_length
"""
_OF_TOKENS = """
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id prefix suppress_tokens begin_suppress_tokens bad_words_ids
    boi_token_index eoi_token_index image_token_index
"""
_OF_GENERATION = """
    do_sample early_stopping max_length min_length num_beams num_beam_groups num_return_sequences diversity_penalty
    encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty no_repeat_ngram_size
    remove_invalid_values repetition_penalty temperature top_k top_p typical_p
"""
_OF_TRAINING = """
    attention_dropout attn_pdrop classifier_dropout embd_pdrop embedding_dropout gradient_checkpointing hidden_dropout
    initializer_range pretraining_tp resid_pdrop residual_dropout output_router_logits router_aux_loss_coef
    router_jitter_noise    block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init
"""
# The tensors show which biases there are, and a tensor that is not read is refused.
_OF_BIASES = "attention_bias lm_head_bias mlp_bias qkv_bias use_bias use_qkv_bias"
# Precision of an intermediate result, and the norms' epsilon of other architectures.
_OF_NUMBERS = """
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 attention_probs_in_fp32 layer_norm_epsilon norm_epsilon
    rms_norm_eps
"""
# Read only where another key asks for them, and else without effect in transformers too.
_CONDITIONAL = """
    hidden_act activation_function initial_context_length layer_types max_window_layers original_max_position_embeddings
    rope_local_base_freq rope_scaling sliding_window sliding_window_pattern sliding_window_size use_sliding_window
"""

CONFIG_WITHOUT_EFFECT = frozenset(
    " ".join((_OF_THE_LIBRARY, _OF_TOKENS, _OF_GENERATION, _OF_TRAINING, _OF_BIASES, _OF_NUMBERS, _CONDITIONAL)).split()
)

CONFIG_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "compression_ratio": (1,),  # ernie 4.5: of positions
    "full_attn_mod": (1,),  # phi 4 mini: every layer
    "interpolate_factor": (1,),
    "mlp_type": ("default",),  # starcoder2
    "norm_type": ("layer_norm",),
    "scale_attn_weights": (True,),
    "position_embedding_type": ("rope", "rotary"),
    "use_rope": (True,),
    "is_causal": (True,),
}
"""Values of other keys that have no effect, besides neutral values."""

_OF_ROPE = """
    type rope_type factor original_max_position_embeddings long_factor short_factor low_freq_factor high_freq_factor
    beta_fast beta_slow mscale mscale_all_dim attention_factor rope_theta partial_rotary_factor truncate finetuned
    max_position_embeddings
"""
ROPE_WITHOUT_EFFECT = frozenset(_OF_ROPE.split())
"""Keys of `rope_parameters` and `rope_scaling`: each kind of scaling reads its own."""
