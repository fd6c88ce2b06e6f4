"""What is refused: layers of kinds that a backend does not run, and drafters that do not suit a model.

Each backend names the kinds that it runs. Standard library and the spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from realizar.backends.base import ModelSource, OtherModels
from realizar.backends.resolved_config import ResolvedConfig
from realizar.errors import InvalidRequestError, UnsupportedModelError
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.parts import AssistantInputs, BlockInputs, NextTokenInputs
from realizar.models.shard import shard
from realizar.models.spec import AnyFeedForward, Attention, Experts, FeedForward, Layer, Mixer, ModelSpec

_NAMES: dict[type[Mixer | AnyFeedForward], str] = {
    Attention: "attention",
    SharedAttention: "attention over the keys and values of an earlier layer",
    ShortConvolution: "a short convolution",
    GatedDeltaNet: "a gated delta net",
    FeedForward: "a dense feed-forward",
    Experts: "a mixture of experts",
}
_DRAFTER = "drafter"
_PADDING = 64  # files of one family pad their vocabularies differently, by up to one in so many ids
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

    `adds_up`: it adds up the sums of ranks.
    """

    backend: str
    mixers: frozenset[type[Mixer]]
    feed_forwards: frozenset[type[AnyFeedForward]]
    features: frozenset[Feature] = frozenset()
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
        if not spec.all_attentions():
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


def find_drafter(others: OtherModels, spec: ModelSpec, config: ResolvedConfig) -> ModelSource | None:
    """The draft model among the models that a load takes beside the main one; None if there is none.

    Raises:
        UnsupportedModelError: a model has another role, or this one can't draft for the main model.
        InvalidRequestError: the configuration has no room for drafts.
    """
    unknown = sorted(others.keys() - {_DRAFTER})
    if unknown:
        raise UnsupportedModelError(f"no backend runs a model as {unknown[0]!r}: the one role is {_DRAFTER!r}")
    drafter = others.get(_DRAFTER)
    if drafter is None:
        return None
    if config.speculative_tokens < 1:
        raise InvalidRequestError("a drafter needs speculative_tokens of at least 1, not 0", "speculative_tokens")
    own, known = num_ids(drafter.spec), num_ids(spec)
    if _PADDING * abs(own - known) > known:
        sizes = f"{own} ids, and the model's {known}"
        raise UnsupportedModelError(f"the drafter's vocabulary has {sizes}: they must be the same, but for padding")
    _check_states(drafter.spec, spec)
    block = drafter.spec.next_token
    if isinstance(block, BlockInputs) and config.speculative_tokens >= block.size:
        message = f"a block of {block.size} tokens drafts {block.size - 1} at most, not {config.speculative_tokens}"
        raise InvalidRequestError(message, "speculative_tokens")
    if drafter.spec.context_length < config.context_length:
        lengths = f"{drafter.spec.context_length} tokens, fewer than the {config.context_length} of the context"
        raise UnsupportedModelError(f"the drafter reads {lengths}: lower context_length")
    if drafter.spec.state_layers():
        raise UnsupportedModelError("a drafter whose layers have states does not run: their drafts can't be undone")
    shared_groups(drafter.spec, spec)
    return drafter


def parts_of(others: OtherModels, rank: int, ranks: int) -> OtherModels:
    """What one of several ranks has of the models beside the main one. Raises as `shard`."""
    return {
        role: ModelSource(shard(each.spec, rank, ranks, each.checkpoint), each.checkpoint)
        for role, each in others.items()
    }


def _check_states(drafter: ModelSpec, spec: ModelSpec) -> None:
    """Refuse a drafter that reads other hidden states, keys or values than a model has."""
    own = drafter.next_token
    if isinstance(own, NextTokenInputs | AssistantInputs) and drafter.state_size != spec.hidden_size:
        name = "next-token block" if isinstance(own, NextTokenInputs) else "assistant"
        sizes = f"{drafter.state_size} numbers, and the model's {spec.hidden_size}"
        raise UnsupportedModelError(f"the {name} reads hidden states of {sizes}")
    if isinstance(own, AssistantInputs):
        _check_keys(drafter, spec)
    fusion = drafter.fusion
    if fusion is None:
        return
    if fusion.linear.in_features != len(fusion.layers) * spec.hidden_size:
        sizes = f"{fusion.linear.in_features} numbers of {len(fusion.layers)} layers, and the model's have"
        raise UnsupportedModelError(f"the drafter reads {sizes} {spec.hidden_size} each")
    if not all(0 <= layer < len(spec.layers) for layer in fusion.layers):
        layers = ", ".join(map(str, fusion.layers))
        raise UnsupportedModelError(f"the drafter reads layers {layers}, and the model has {len(spec.layers)}")


def _check_keys(drafter: ModelSpec, spec: ModelSpec) -> None:
    """Refuse an assistant of a model whose keys and values are others than it reads."""
    own = dict(spec.attentions())
    for layer, reads in drafter.all_attentions():
        if not isinstance(reads, SharedAttention) or reads.source not in own:
            raise UnsupportedModelError(f"layer {layer} of the assistant reads no keys of the model")
        kept = own[reads.source]
        wanted, there = ((each.num_kv_heads, each.head_size, each.window) for each in (reads, kept))
        if wanted != there:
            shapes = " and ".join(
                f"{heads} of {size} numbers {'without a window' if window is None else f'in a window of {window}'}"
                for heads, size, window in (wanted, there)
            )
            raise UnsupportedModelError(
                f"layer {layer} of the assistant reads other keys than layer {reads.source} of the model has: {shapes}"
            )


def num_ids(spec: ModelSpec) -> int:
    """Ids that a model reads; a drafter may draft fewer. Of an assistant, which reads its model's, its own."""
    reads_own = spec.next_token is None or isinstance(spec.next_token, AssistantInputs)
    return spec.vocab_size if reads_own else spec.tensors[spec.embedding].shape[0]


def shared_groups(drafter: ModelSpec, spec: ModelSpec) -> list[int]:
    """Of each cache group of a drafter, the index of the main model's group whose blocks it shares.

    Raises UnsupportedModelError where the main model has no layers that keep as many tokens.
    """
    windows = [group.window for group in spec.cache_groups()]
    for group in drafter.cache_groups():
        if group.window not in windows:
            kept = "all tokens" if group.window is None else f"a window of {group.window} tokens"
            raise UnsupportedModelError(f"the drafter has layers that keep {kept}, and the model has none")
    return [windows.index(group.window) for group in drafter.cache_groups()]
