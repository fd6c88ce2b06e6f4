"""`TowerBuilder`: the parts of an encoder of images, from which a projector's file composes a `Tower`. numpy only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.dimensions import MAX_FEED_FORWARD, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Activation, Linear, Norm
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_source import TensorSource
from realizar.models.tower import Colour

MAX_EDGE = 1 << 14  # pixels
_MAX_PATCHES = 1 << 14
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_out",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.norm": "v.post_ln",
    "patches": "v.patch_embd",
    "positions": "v.position_embd",
}
_GGUF_SWAPPED = _GGUF | {"mlp.c_fc": "ffn_down", "mlp.c_proj": "ffn_up"}


class TowerBuilder(SpecBuilder):
    """Builds the parts of one tower. Norms of kind `layer` have biases, and so has the matrix of patches then.

    Args:
        patch_bias: the matrix of patches has one, whatever norms have.
        hparams: of the tower; see `tower_parameters`.
        names: of safetensors checkpoints, by canonical name without `.weight`, and in a layer without
            `model.layers.0.`; those of layers follow `layers` and their number.
        gguf_names: of GGUF files, beside the usual ones.
    """

    def __init__(
        self,
        hparams: HyperParameters,
        sizes: Dimensions,
        *,
        names: Mapping[str, str],
        layers: str,
        gguf_names: Mapping[str, str],
        norm_kind: Literal["rms", "layer"] = "layer",
        patch_bias: bool = False,
        activation_key: str = "hidden_act",
        default_activation: Activation = "gelu_tanh",
    ) -> None:
        super().__init__(
            hparams,
            sizes,
            norm_kind=norm_kind,
            norm_bias=norm_kind == "layer",
            activation_key=activation_key,
            default_activation=default_activation,
        )
        self._patch_bias = patch_bias or norm_kind == "layer"
        self._layers = "v.blk" if hparams.is_gguf else layers
        self._stored = names
        if hparams.is_gguf:
            down = hparams.checkpoint.tensors.get("v.blk.0.ffn_down.weight")
            swapped = down is not None and down.shape == (sizes.feed_forward_size, sizes.hidden_size)
            # Older converters named the two matrices of a feed-forward the other way round.
            self._stored = (_GGUF_SWAPPED if swapped else _GGUF) | dict(gguf_names)

    def stored_name(self, canonical: str) -> str:
        layer = _LAYER.fullmatch(canonical)
        if layer is not None:
            return f"{self._layers}.{layer[1]}.{self._stored.get(layer[2], layer[2])}.{layer[3]}"
        base, _, kind = canonical.rpartition(".")
        return f"{self._stored[base]}.{kind}"

    def patches(self, name: str, patch_size: int, frames: int | None = None, *, by_pixel: bool = False) -> Linear:
        """The matrix of patches, which checkpoints have as a convolution [hidden_size, 3, (frames,) height, width], or
        as it is where it reads patches `by_pixel`.

        Of frames None is one without an axis of its own.
        """
        hidden, columns = self.sizes.hidden_size, 3 * (frames or 1) * patch_size**2
        as_convolution = (hidden, 3, *(() if frames is None else (frames,)), patch_size, patch_size)
        stored_shape = None if by_pixel else as_convolution
        source = TensorSource(self.stored_name(f"{name}.weight"), (hidden, columns), stored_shape=stored_shape)
        weight, bias_name = self.note(f"{name}.weight", source), None
        if self._patch_bias:
            bias_name = self.note(f"{name}.bias", TensorSource(self.stored_name(f"{name}.bias"), (hidden,)))
        return Linear(weight, hidden, columns, bias_name)

    def squares(self, name: str, out_features: int, merge: int) -> Linear:
        """A matrix of squares of patches, which checkpoints have as a convolution, with a bias."""
        shape = (out_features, self.sizes.hidden_size * merge**2)
        stored_shape = (out_features, self.sizes.hidden_size, merge, merge)
        places = TensorSource(self.stored_name(f"{name}.weight"), shape, stored_shape=stored_shape)
        return Linear(self.note(f"{name}.weight", places), *shape, self._note(f"{name}.bias", shape[:1]))

    def layer_norm(self, base: str, size: int, eps: float) -> Norm:
        """A LayerNorm with a bias, whatever the other norms are."""
        weight, bias = (self._note(f"{base}.{part}", (size,)) for part in ("weight", "bias"))
        return Norm("layer", eps, weight, bias)

    def second_patches(self, patch_size: int) -> Linear:
        """The matrix of the second of two frames, which GGUF files have apart."""
        shape = (self.sizes.hidden_size, 3 * patch_size**2)
        stored_shape = (shape[0], 3, patch_size, patch_size)
        source = TensorSource(f"{self.stored_name('patches.weight')}.1", shape, stored_shape=stored_shape)
        return Linear(self.note("patches.1.weight", source), *shape)

    def table(self, name: str, rows: int) -> str:
        """A table of vectors, [rows, hidden_size]."""
        weight = f"{name}.weight"
        return self.note(weight, TensorSource(self.stored_name(weight), (rows, self.sizes.hidden_size)))

    @property
    def tensors(self) -> Mapping[str, TensorSource]:
        """Of all parts that were built."""
        return self._tensors


def tower_parameters(checkpoint: Checkpoint, projector: str, *, beside_sound: bool = False) -> HyperParameters:
    """Those of a tower: the keys of `clip` in a GGUF file, or the `vision_config` of a configuration.

    A GGUF file may hold an encoder of sound too where the tower is `beside_sound`, which is not read.
    """
    if checkpoint.format == "gguf":
        hparams = HyperParameters(checkpoint, "clip")
        if hparams.boolean("has_audio_encoder", None, default=False) and not beside_sound:
            raise UnsupportedModelError(f"{checkpoint.path}: encoders of sound are not supported")
        for key in checkpoint.metadata:
            if key.startswith("clip.audio.") and beside_sound:
                hparams.raw(key.removeprefix("clip."), None)
        for key in ("has_vision_encoder", "projector_type", "vision.projector_type"):
            hparams.raw(key, None)
        return hparams
    vision: Any = checkpoint.metadata["config"].get("vision_config")
    return HyperParameters(checkpoint, projector, vision if isinstance(vision, Mapping) else {})


def whole_parameters(hparams: HyperParameters) -> HyperParameters:
    """Those of the whole model that a tower belongs to; in a GGUF file the tower's own."""
    if hparams.is_gguf:
        return hparams
    return HyperParameters(hparams.checkpoint, hparams.architecture, hparams.checkpoint.metadata["config"])


def processor_parameters(hparams: HyperParameters, resample: int, *, normalizes: bool = True) -> HyperParameters:
    """How a model's images are prepared: `preprocessor_config.json`; in a GGUF file the tower's own parameters.

    Raises:
        CheckpointError: the file is missing.
        UnsupportedModelError: a step is left out, or pixels are resized by another filter than Pillow's `resample`.
    """
    checkpoint = hparams.checkpoint
    if hparams.is_gguf:
        return hparams
    path, config = checkpoint.path / "preprocessor_config.json", checkpoint.metadata.get("preprocessor_config")
    if not isinstance(config, Mapping):
        raise CheckpointError(path, "file", "is missing, which says how images are prepared")
    own = HyperParameters(checkpoint, hparams.architecture, config)
    for key in ("do_resize", "do_rescale", "do_convert_rgb", "do_pad"):
        own.only(None, key, True)
    own.only(None, "do_normalize", normalizes)
    own.only(None, "resample", resample)
    own.only(None, "rescale_factor", 1 / 255)
    return own


def part_of(own: HyperParameters, key: str) -> HyperParameters:
    """Those of an object in a configuration, empty where there is none; what is left unread there is no fault."""
    part: Any = own.raw(None, key)
    return HyperParameters(own.checkpoint, own.architecture, part if isinstance(part, Mapping) else {})


def read_edge(own: HyperParameters, key: str) -> int:
    """`longest_edge`, in pixels, of one of a processor's sizes."""
    return part_of(own, key).integer(None, "longest_edge", high=MAX_EDGE)


def read_pixels(own: HyperParameters, gguf: str, older: str, key: str, default: int) -> int:
    """A number of pixels of a processor's `size`, by its key there, or by an older one of its own, which goes first."""
    if not own.is_gguf:
        default = part_of(own, "size").integer(None, key, high=MAX_EDGE**2, default=default)
    return own.integer(gguf, older, high=MAX_EDGE**2, default=default)


def read_text_size(whole: HyperParameters) -> int:
    """The hidden size of the text model."""
    if whole.is_gguf:
        return whole.integer("vision.projection_dim", None, high=MAX_WIDTH)
    return part_of(whole, "text_config").integer(None, "hidden_size", high=MAX_WIDTH)


def read_tower_sizes(
    hparams: HyperParameters, defaults: Mapping[str, int], eps: float, keys: Mapping[str, str] | None = None
) -> tuple[Dimensions, int]:
    """The sizes of a tower, whose vocabulary and context are a picture's patches, and the edge of a patch in pixels.

    Args:
        defaults: by `config.json` key, where configurations leave keys out.
        eps: the default of the norms' epsilon.
        keys: of `config.json` that differ from the usual ones; one for `image_size` is a number of patches.
    """
    known, others = ({} if hparams.is_gguf else defaults), keys or {}

    def read(gguf: str, hf: str, high: int) -> int:
        hf = others.get(hf, hf)
        value = hparams.raw(None, hf)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:  # a height and a width
            return hparams.checked_integer(None, hf, value[0], 1, high)
        if hf in known:
            return hparams.integer(f"vision.{gguf}", hf, high=high, default=known[hf])
        return hparams.integer(f"vision.{gguf}", hf, high=high)

    hidden = read("embedding_length", "hidden_size", MAX_WIDTH)
    heads = read("attention.head_count", "num_attention_heads", MAX_HEADS)
    patch, image = read("patch_size", "patch_size", MAX_EDGE), read("image_size", "image_size", MAX_EDGE)
    if "image_size" in others and not hparams.is_gguf:
        image = math.isqrt(image) * patch
    hparams.only(None, others.get("num_channels", "num_channels"), 3)
    if hidden % heads:
        message = f"{heads} heads do not divide the hidden size {hidden}"
        raise hparams.malformed("vision.attention.head_count", "num_attention_heads", message)
    if image % patch or (image // patch) ** 2 > _MAX_PATCHES:
        raise hparams.malformed("vision.image_size", "image_size", f"{image} pixels are no whole patches of {patch}")
    patches = (image // patch) ** 2
    eps_keys = ("vision.attention.layer_norm_epsilon", others.get("layer_norm_eps", "layer_norm_eps"))
    sizes = Dimensions(
        vocab_size=patches,
        hidden_size=hidden,
        num_layers=read("block_count", "num_hidden_layers", MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        feed_forward_size=read("feed_forward_length", "intermediate_size", MAX_FEED_FORWARD),
        context_length=patches,
        trained_context_length=patches,
        norm_eps=hparams.number(*eps_keys, high=1.0, default=eps),
    )
    return sizes, patch


def read_default_activation(hparams: HyperParameters, of_config: Activation) -> Activation:
    """Where a configuration has no key it is its kind's; a GGUF file has a key for each of two."""
    if not hparams.is_gguf:
        return of_config
    silu = hparams.boolean("use_silu", None, default=False)
    hparams.only("use_gelu", None, not silu)
    return "silu" if silu else "gelu"


def read_colour(hparams: HyperParameters, gguf: str, hf: str, default: Colour = (0.5, 0.5, 0.5)) -> Colour:
    """Three numbers; the default where the key is absent."""
    value = hparams.raw(gguf, hf)
    if value is None:
        return default
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 3:
        raise hparams.malformed(gguf, hf, "expected three numbers")
    red, green, blue = (float(hparams.checked_number(gguf, hf, each, above=-1.0)) for each in value)
    return (red, green, blue)
