"""`HyperParameters`: hyper-parameters read strictly from GGUF keys or from `config.json`. Standard library only.

A getter takes the GGUF key (without the architecture's prefix) and the `config.json` key; None if a format does not
have the parameter, which then gets its default. Every value is checked for type and range; errors name file and key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeGuard, TypeVar

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError


class Required(Enum):
    REQUIRED = 0


REQUIRED: Final = Required.REQUIRED

T = TypeVar("T")

# The numbers of all models are in this range, in which float32 arithmetic with a few of them can't over- or underflow.
MIN_NUMBER, MAX_NUMBER = 1e-15, 1e12

# For keys with these suffixes, 1 is neutral too.
_FACTOR_SUFFIXES = ("_scale", "_multiplier", "_scaling")


class HyperParameters:
    """The hyper-parameters of one checkpoint.

    Args:
        architecture: GGUF `general.architecture`, or the `model_type`.
        config: `config.json`, or the part of it that describes the text model; ignored for GGUF.
        context_length, experts_per_token: as the user configured, or None for the model's own.

    Attributes:
        drafts: the block that drafts the next tokens is to be described, in place of the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: str,
        config: Mapping[str, Any] | None = None,
        context_length: int | None = None,
        experts_per_token: int | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.architecture = architecture
        self.requested_context_length = context_length
        self.requested_experts_per_token = experts_per_token
        self.drafts = False
        self.is_gguf = checkpoint.format == "gguf"
        self._values: Mapping[str, Any] = checkpoint.metadata if self.is_gguf else (config or {})
        self._parent = ""
        self._read: set[str] = set()
        self._nested: dict[str, HyperParameters] = {}

    def nested(self, hf: str, values: Mapping[str, Any]) -> HyperParameters:
        """Those in a dictionary under a `config.json` key: for one key always one object, which knows what was read."""
        if hf in self._nested:
            return self._nested[hf]
        inner = HyperParameters(self.checkpoint, self.architecture, values, self.requested_context_length)
        inner._parent = f"{self._parent}{hf}."
        self._nested[hf] = inner
        return inner

    @property
    def path(self) -> Path:
        return self.checkpoint.path if self.is_gguf else config_path(self.checkpoint)

    def key(self, gguf: str | None, hf: str | None) -> str | None:
        if not self.is_gguf:
            return hf
        return None if gguf is None else f"{self.architecture}.{gguf}"

    def raw(self, gguf: str | None, hf: str | None) -> Any:
        """The unchecked value, or None if the key is absent or null."""
        key = self.key(gguf, hf)
        if key is None:
            return None
        self._read.add(key)
        return self._values.get(key)

    def is_present(self, gguf: str | None, hf: str | None) -> bool:
        """True if the key is there, even with a null value (which in `config.json` may differ from a missing key)."""
        key = self.key(gguf, hf)
        return key is not None and key in self._values

    def malformed(self, gguf: str | None, hf: str | None, reason: str) -> CheckpointError:
        """The error for a value that no model can have."""
        return CheckpointError(self.path, f"key '{self._parent}{self.key(gguf, hf)}'", reason)

    def unsupported(self, gguf: str | None, hf: str | None, value: object) -> UnsupportedModelError:
        """The error for a value that this program does not support."""
        key = f"{self._parent}{self.key(gguf, hf)}"
        return UnsupportedModelError(f"{self.path}: key '{key}': unsupported value {_shorten(value)}")

    def integer(
        self,
        gguf: str | None,
        hf: str | None,
        *,
        high: int,
        low: int = 1,
        default: int | Required = REQUIRED,
        absent: int | None = None,
        varies: bool = False,
    ) -> int:
        """A whole number from `low` to `high`.

        A GGUF array with one value per layer is accepted if all are equal, other than those that are `absent`. Where
        the value `varies` by layer, that of the first layer counts here; see `integers`.
        """
        value = self._uniform(gguf, hf, self.raw(gguf, hf), absent, varies)
        if value is None:
            return self._default(gguf, hf, default)
        return self.checked_integer(gguf, hf, value, low, high)

    def integers(self, gguf: str, count: int, *, high: int) -> list[int]:
        """Whole numbers from 1 to `high` of a GGUF file, one for each of `count` layers; a single one is of all."""
        values = self.raw(gguf, None)
        if values is None or isinstance(values, str | bytes) or not _is_sequence(values):
            return [self.integer(gguf, None, high=high)] * count
        if len(values) != count:
            raise self.malformed(gguf, None, f"expected a list of {count}, one per layer")
        return [self.checked_integer(gguf, None, value, 1, high) for value in values]

    def checked_integer(self, gguf: str | None, hf: str | None, value: object, low: int, high: int) -> int:
        """`value`, found under the key, as a whole number from `low` to `high`."""
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise self.malformed(gguf, hf, f"expected a whole number, found {_shorten(value)}")
        number = int(value)
        if not low <= number <= high:
            raise self.malformed(gguf, hf, f"{number} is not within {low} to {high}")
        return number

    def number(
        self,
        gguf: str | None,
        hf: str | None,
        *,
        default: float | Required = REQUIRED,
        above: float = 0.0,
        high: float = MAX_NUMBER,
    ) -> float:
        """A number greater than `above`, from MIN_NUMBER to `high`."""
        value = self.raw(gguf, hf)
        if value is None:
            return self._default(gguf, hf, default)
        return self.checked_number(gguf, hf, value, above=above, high=high)

    def checked_number(
        self, gguf: str | None, hf: str | None, value: object, *, above: float = 0.0, high: float = MAX_NUMBER
    ) -> float:
        """`value`, found under the key, as a number greater than `above`, from MIN_NUMBER to `high`."""
        if not _is_number(value):
            raise self.malformed(gguf, hf, f"expected a number, found {_shorten(value)}")
        number = float(value)
        if not (math.isfinite(number) and above < number <= high and number >= MIN_NUMBER):
            raise self.malformed(gguf, hf, f"{number} is not within {max(above, MIN_NUMBER):g} to {high:g}")
        return number

    def optional_number(self, gguf: str | None, hf: str | None) -> float | None:
        """A positive number; None if the key is absent, null or zero (soft caps, scales)."""
        value = self.raw(gguf, hf)
        if value is None or (_is_number(value) and value == 0):
            return None
        return self.checked_number(gguf, hf, value)

    def boolean(self, gguf: str | None, hf: str | None, *, default: bool) -> bool:
        """Raises `CheckpointError` for values other than true and false; `default` is for an absent key."""
        return self._typed(gguf, hf, bool, "true or false", default)

    def text(self, gguf: str | None, hf: str | None, *, default: str) -> str:
        """Raises `CheckpointError` for other values than texts; `default` is for an absent key."""
        return self._typed(gguf, hf, str, "a text", default)

    def only(self, gguf: str | None, hf: str | None, *known: object) -> None:
        """Raise UnsupportedModelError for any value but the known ones, each of its type; the key may be absent."""
        value = self.raw(gguf, hf)
        if value is not None and not any(type(value) is type(each) and value == each for each in known):
            raise self.unsupported(gguf, hf, value)

    def layer_types(self, count: int, *known: str) -> list[str] | None:
        """`layer_types` of `config.json`, one of some known kinds for each of `count` layers; None without the key."""
        stated = self.raw(None, "layer_types")
        if stated is None:
            return None
        if not isinstance(stated, list) or len(stated) != count:
            raise self.malformed(None, "layer_types", f"expected a list of {count}, one per layer")
        for kind in stated:
            if kind not in known:
                raise self.unsupported(None, "layer_types", kind)
        return stated

    def _typed(self, gguf: str | None, hf: str | None, kind: type[T], expected: str, default: T) -> T:
        value = self.raw(gguf, hf)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.malformed(gguf, hf, f"expected {expected}, found {_shorten(value)}")
        return value

    def refuse_unread(self) -> None:
        """Raise UnsupportedModelError for a key that was not read, unless it has no effect or is neutral."""
        prefix = f"{self.architecture}." if self.is_gguf else ""
        for key, value in self._values.items():
            name = key.removeprefix(prefix)
            if key in self._read or not key.startswith(prefix) or self._is_without_effect(name, value):
                continue
            raise UnsupportedModelError(
                f"{self.path}: key '{self._parent}{key}': unsupported value {_shorten(value)}: this architecture"
                " does not know the key, which may change the result"
            )
        for inner in self._nested.values():
            inner.refuse_unread()

    def _is_without_effect(self, name: str, value: Any) -> bool:
        if _is_neutral(value) or (name.endswith(_FACTOR_SUFFIXES) and isinstance(value, Real) and value == 1):
            return True
        if self.is_gguf:
            return name in _GGUF_WITHOUT_EFFECT
        if self._parent:  # of rope: a dictionary for each kind of layer, or one
            return name in _ROPE_WITHOUT_EFFECT or isinstance(value, Mapping)
        if name.startswith("_") or name in _CONFIG_WITHOUT_EFFECT:
            return True
        return any(value == neutral for neutral in _CONFIG_NEUTRAL.get(name, ()))

    def _default(self, gguf: str | None, hf: str | None, default: T | Required) -> T:
        if isinstance(default, Required):
            raise self.malformed(gguf, hf, "missing")
        return default

    def _uniform(self, gguf: str | None, hf: str | None, value: Any, absent: int | None, varies: bool) -> Any:
        if not self.is_gguf or isinstance(value, str | bytes) or not _is_sequence(value):
            return value
        items = [item for item in value if absent is None or item != absent]
        if not items:
            raise self.malformed(gguf, hf, "empty array" if len(value) == 0 else f"{absent} for every layer")
        if not varies and any(item != items[0] for item in items):
            raise self.unsupported(gguf, hf, value)
        return items[0]


def config_path(checkpoint: Checkpoint) -> Path:
    return checkpoint.path / "config.json"


def _is_number(value: object) -> TypeGuard[Real]:
    """True for a number other than true and false; an array of one is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_sequence(value: object) -> bool:
    """True for a list or a numpy array, which is not a `Sequence`."""
    return not isinstance(value, Mapping) and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _is_neutral(value: Any) -> bool:
    if isinstance(value, Mapping) or (_is_sequence(value) and not isinstance(value, str)):
        return len(value) == 0
    return value in (None, False, 0, "", "none")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Keys of `config.json` and of GGUF files without effect on the result of a decoder. Standard library only.
#
# The keys are from the published files of these architectures, and from the configuration classes of transformers. A
# key that an architecture's file reads need not be here; an unknown key is refused by name.

_GGUF_WITHOUT_EFFECT = frozenset(
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

_CONFIG_WITHOUT_EFFECT = frozenset(
    " ".join((_OF_THE_LIBRARY, _OF_TOKENS, _OF_GENERATION, _OF_TRAINING, _OF_BIASES, _OF_NUMBERS, _CONDITIONAL)).split()
)

_CONFIG_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
_ROPE_WITHOUT_EFFECT = frozenset(_OF_ROPE.split())
"""Keys of `rope_parameters` and `rope_scaling`: each kind of scaling reads its own."""
