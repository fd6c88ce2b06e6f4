"""Small models of random weights, one for each kind of layer that has kernels of its own."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, TypeAlias

from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.generated.generate import generated_checkpoint
from realizar.models.generated.shapes import SHAPES
from realizar.models.mixers import GatedDeltaNet, ShortConvolution
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec

_EMBEDDING_STD = 1 / 16  # small, so that what layers add to it is most of what the head reads

_Weights: TypeAlias = Literal["q4_k_m", "bf16"]


class SmallModel(NamedTuple):
    """A shape, a key of `SHAPES`, and the type of its weights."""

    shape: str
    weights: _Weights

    def __str__(self) -> str:
        return f"{self.shape} of {self.weights}"

    def make(self) -> tuple[ModelSpec, Checkpoint]:
        """The model itself. A token goes through all experts: of two nearly as likely, roundings would choose."""
        checkpoint = generated_checkpoint(self.shape, self.weights, _EMBEDDING_STD)
        return build_spec(checkpoint, None, SHAPES[self.shape].num_experts or None), checkpoint


SMALL_MODELS = tuple(
    SmallModel(shape, weights)
    for shape in ("small", "tiny-window", "tiny-moe", "tiny-delta", "tiny-convolution")
    for weights in ("q4_k_m", "bf16")
)


def small_models_like(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[SmallModel, ...]:
    """Those with the kinds of layers that a model has, and quantised weights or floats as most of its bytes are."""
    tensors, sizes = WeightTensors(spec, checkpoint), Counter[bool]()
    for name in spec.tensors:
        sizes[tensors.layout(name).is_float] += tensors.size_bytes(name)
    mixers = [layer.mixer for layer in spec.layers]
    kinds = {
        "small": True,  # and wide enough that matmuls with epilogues fill a card
        "tiny-window": any(attention.window is not None for _, attention in spec.all_attentions()),
        "tiny-moe": bool(spec.mixtures()),
        "tiny-delta": any(isinstance(mixer, GatedDeltaNet) for mixer in mixers),
        "tiny-convolution": any(isinstance(mixer, ShortConvolution) for mixer in mixers),
    }
    weights = "bf16" if sizes[True] > sizes[False] else "q4_k_m"
    return tuple(model for model in SMALL_MODELS if kinds[model.shape] and model.weights == weights)
