"""Each backend names the kinds of layers that it runs, and refuses others. Standard library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from realizar.errors import UnsupportedModelError
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.spec import AnyFeedForward, Attention, Experts, FeedForward, Layer, Mixer, ModelSpec

_NAMES: dict[type[Mixer | AnyFeedForward], str] = {
    Attention: "attention",
    SharedAttention: "attention over the keys and values of an earlier layer",
    ShortConvolution: "a short convolution",
    GatedDeltaNet: "a gated delta net",
    FeedForward: "a dense feed-forward",
    Experts: "a mixture of experts",
}
_MAX_LISTED = 8
_WIDEST_HEAD = 128  # features of a delta net's: of wider ones a tile fits in no card's shared memory


class Feature(Enum):
    """Parts of a layer that a backend may lack, and their names in messages."""

    QUERY_GROWTH = "queries that grow with the position"
    CLAMPED_EXPERTS = "experts with a clamped SwiGLU"
    EXPERT_BIASES = "experts with biases"
    UNGATED_EXPERTS = "experts without a gate"
    ROUTER_BIAS = "a router with a bias"
    SIGMOID_ROUTER = "a router of sigmoids"
    SELECTION_BIAS = "a selection bias of experts"
    EXPERT_GROUPS = "groups of experts"
    SHARED_EXPERT = "a shared expert"
    EXPERT_SCALES = "factors of experts"
    EXPERT_NORMS = "experts beside a dense feed-forward, each with norms"
    VALUE_NORM = "norms of values"
    OUTPUT_GATE = "attention with an output gate"
    WIDE_DELTA_NET = "a gated delta net whose heads have more than 128 features"
    INPUT_GATE = "inputs of their own"
    OUTPUT_SCALE = "factors of their outputs"


@dataclass(frozen=True, slots=True)
class Supported:
    """The kinds that a backend runs; `backend` is its name in messages, such as `the CPU backend`.

    `sees_images_whole`: tokens of an image may see each other (`StepRows.images`).
    `adds_up`: it adds up the sums of ranks.
    """

    backend: str
    mixers: frozenset[type[Mixer]]
    feed_forwards: frozenset[type[AnyFeedForward]]
    features: frozenset[Feature] = frozenset()
    sees_images_whole: bool = False
    adds_up: bool = False

    def check(self, spec: ModelSpec) -> None:
        """Refuse a model with parts of other kinds.

        Raises UnsupportedModelError with the architecture, the first such kind and its layers, or for a part of several
        ranks.
        """
        share = spec.share
        if share.ranks > 1 and not self.adds_up:
            raise UnsupportedModelError(
                f"{spec.architecture}: this is the part of rank {share.rank} of {share.ranks}, and {self.backend} can't"
                " add up the sums of ranks"
            )
        unknown: dict[str, list[int]] = {}
        for index, layer in enumerate(spec.layers):
            for part, known in ((layer.mixer, self.mixers), (layer.feed_forward, self.feed_forwards)):
                if part is not None and type(part) not in known:
                    unknown.setdefault(f"{_NAMES[type(part)]}, which {self.backend} does not run", []).append(index)
            for feature in _features(layer):
                if feature not in self.features:
                    unknown.setdefault(f"{feature.value}, which {self.backend} does not run", []).append(index)
        for reason, layers in unknown.items():
            raise UnsupportedModelError(f"{spec.architecture}: {_listed(layers)} {reason}")
        if not spec.attentions():
            raise UnsupportedModelError(f"{spec.architecture}: no layer has attention, which {self.backend} needs")


def _features(layer: Layer) -> Iterator[Feature]:
    if isinstance(layer.mixer, Attention) and layer.mixer.query_growth is not None:
        yield Feature.QUERY_GROWTH
    if isinstance(layer.mixer, Attention) and layer.mixer.v_norm_eps is not None:
        yield Feature.VALUE_NORM
    if isinstance(layer.mixer, Attention) and layer.mixer.gate is not None:
        yield Feature.OUTPUT_GATE
    if isinstance(layer.mixer, GatedDeltaNet) and max(layer.mixer.key_size, layer.mixer.value_size) > _WIDEST_HEAD:
        yield Feature.WIDE_DELTA_NET
    if layer.input_gate is not None:
        yield Feature.INPUT_GATE
    if layer.output_scale is not None:
        yield Feature.OUTPUT_SCALE
    experts = layer.feed_forward
    if not isinstance(experts, Experts):
        return
    found = {
        Feature.CLAMPED_EXPERTS: experts.clamped,
        Feature.EXPERT_BIASES: any(each.bias is not None for each in experts.expert_linears()),
        Feature.UNGATED_EXPERTS: experts.gate is None,
        Feature.ROUTER_BIAS: experts.router.bias is not None,
        Feature.SIGMOID_ROUTER: experts.scoring == "sigmoid",
        Feature.SELECTION_BIAS: experts.selection_bias is not None,
        Feature.EXPERT_GROUPS: experts.num_groups > 1,
        Feature.SHARED_EXPERT: experts.shared is not None,
        Feature.EXPERT_SCALES: experts.expert_scales is not None,
        Feature.EXPERT_NORMS: experts.norms is not None,
    }
    yield from (feature for feature, is_there in found.items() if is_there)


def _listed(layers: Iterable[int]) -> str:
    """`layer 3 has`, or `layers 0, 1, 3 have`."""
    found = list(layers)
    names = ", ".join(map(str, found[:_MAX_LISTED]))
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return f"layer {names} has" if len(found) == 1 else f"layers {names}{more} have"
