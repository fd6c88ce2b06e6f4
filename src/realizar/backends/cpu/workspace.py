"""Fixed memory of a step: buffers of tokens, and the small arrays through which a step is described to the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import FUSED_AT_ONCE
from realizar.backends.cpu.activation_layout import GROUP, RECORD_BYTES
from realizar.backends.cpu.kernels.attention_record import ROW_FIELDS, STEP_TOKENS
from realizar.backends.cpu.kernels.delta_net import delta_scratch_bytes
from realizar.backends.cpu.kernels.linear import BLOCK_TOKENS
from realizar.backends.cpu.kernels.routing import COUNT_FIELDS, COUNT_READ, COUNT_SORTED, ITEM_FIELDS
from realizar.backends.cpu.records import Record, address, aligned_zeros
from realizar.backends.cpu.state.sizes import convolved_width, inputs_width, output_width, state_sizes
from realizar.backends.cpu.walker import LINE_BYTES
from realizar.backends.machine import memory_bytes
from realizar.backends.resolved_config import ResolvedConfig
from realizar.errors import InvalidRequestError
from realizar.models.mixers import GatedDeltaNet
from realizar.models.parts import AssistantInputs, PairedInputs
from realizar.models.spec import Experts, LayerStack, ModelSpec
from realizar.models.tower import Tower
from realizar.sizes import format_bytes

_TOKEN_PADDING = 16  # float32 between tokens: values a power of two apart would share cache sets
_LEAST_SELECTED, _MOST_SELECTED = 32, 64
_SELECTED_LOGITS = 1 << 22  # 16 MiB, which leaves room for the head's weights in the caches of today's processors


TOKEN_SQUARES = "token squares"
"""The name of the buffer of each token's sum of squares, of a rank's norms over all heads."""


class RecordBuffer:
    """Quantised records of some tokens, uint8 [blocks, groups, width, 64] (`activation_layout`)."""

    def __init__(self, tokens: int, groups: int, width: int) -> None:
        shape = (-(-tokens // width), groups, width, RECORD_BYTES)
        self._data = aligned_zeros(shape, np.uint8)
        self.groups, self.width = groups, width

    @property
    def at(self) -> int:
        return address(self._data)

    def at_column(self, column: int) -> int:
        """The address of the group that begins with a column."""
        return self.at + column // GROUP * self.width * RECORD_BYTES

    @property
    def size_bytes(self) -> int:
        return int(self._data.nbytes)


@dataclass(frozen=True, slots=True)
class RowBuffer:
    """Rows of float32, [tokens, padded width], and of quantised records beside them.

    `records` is None where nothing quantised reads them. `terms` has records of twice the tokens, each token's and
    those of what it leaves over (`AttentionBinder.two_terms`), or is None.
    """

    values: NDArray[np.float32]
    records: RecordBuffer | None
    terms: RecordBuffer | None

    @property
    def at(self) -> int:
        return address(self.values)

    @property
    def stride(self) -> int:
        return int(self.values.strides[0])

    def fields(self, name: str) -> dict[str, int]:
        """The fields by which a kernel finds the rows of float32."""
        return {name: self.at, f"{name}_stride": self.stride}


def written_records(buffer: RecordBuffer | None, column: int = 0) -> dict[str, int]:
    """The fields by which a kernel finds the records that it writes, from a column on; none without a buffer."""
    if buffer is None:
        return {"records": 0, "records_groups": 0, "records_width": 1}
    return {"records": buffer.at_column(column), "records_groups": buffer.groups, "records_width": buffer.width}


def kept_stream(place: int) -> str:
    """The name of the buffer of the stream after a layer of `ResolvedConfig.hidden_layers`, by its place there."""
    return f"kept {place}"


def added_features(layer: int) -> str:
    """The name of the buffer of what is added after one of the first layers (`ModelSpec.deepstack`)."""
    return f"added {layer}"


def buffer_widths(spec: LayerStack, num_kept: int) -> dict[str, int]:
    """Width of every buffer of `program`, the stream kept after `num_kept` layers among them."""
    widths = _layer_widths(spec)
    if isinstance(spec, Tower):
        linears = [linear for each in spec.projectors for linear in each.linears()]
        inner = dict.fromkeys(  # one stride for all three
            ("gate", "up", "activated"), max(widths["up"], *(each.out_features for each in linears))
        )
        widths |= {"patches": spec.patches[0].in_features, "squares": linears[0].in_features, **inner}
        widths |= {"reduced": spec.projector.first.in_features, "features": spec.projector.num_features}
        clipped = [each.in_features for each in spec.matrices() if each.clamps is not None]
        widths |= {"clipped": max(clipped)} if clipped else {}
    if isinstance(spec, ModelSpec):
        widths |= {"selected": spec.hidden_size, "logits": spec.vocab_size}
        if spec.layer_inputs is not None:
            widths |= dict.fromkeys(("layer inputs", "layer rows"), spec.layer_inputs.projection.out_features)
        if spec.next_token is not None:
            widths["states"] = spec.state_size
        if isinstance(spec.next_token, AssistantInputs):
            widths |= dict.fromkeys(("embedded", "handed on"), spec.state_size)
            widths["normed"] = max(spec.hidden_size, spec.state_size)
        widths |= {added_features(layer): spec.hidden_size for layer in range(spec.deepstack)}
        if spec.share.ranks > 1 and any(one.qk_norm_axis == "token" for _, one in spec.attentions()):
            widths[TOKEN_SQUARES] = 1
        if spec.fusion is not None:
            widths |= {"streams": spec.fusion.linear.in_features, "fused": spec.hidden_size}
        if isinstance(spec.next_token, PairedInputs):
            widths["normed"] = 2 * spec.hidden_size
    return widths | {kept_stream(place): spec.hidden_size for place in range(num_kept)}


def _layer_widths(spec: LayerStack) -> dict[str, int]:
    """Of what layers read and write."""
    inputs = spec.layer_inputs if isinstance(spec, ModelSpec) else None
    mixtures = [experts for _, experts in spec.mixtures()]
    shared = [one.shared for one in mixtures if one.shared is not None]
    dense = [*(one for _, one in spec.feed_forwards()), *shared]
    widest = max((*(one.up.out_features for one in dense), 0 if inputs is None else inputs.size))
    query = max(a.num_heads * a.head_size for _, a in spec.all_attentions())
    mixers = [spec.layers[layer].mixer for layer in spec.state_layers()]
    attended = max(query, *(output_width(mixer) for mixer in mixers), 0)
    key = max((a.num_kv_heads * a.head_size for _, a in spec.attentions()), default=0)
    hidden = spec.hidden_size
    widths = {
        "hidden": hidden, "normed": hidden, "branch": hidden, "query": query, "key": key,
        "value": 2 * (-(-key // GROUP) * GROUP),
        "attended": attended, "gate": widest, "up": widest, "activated": widest,
    }  # fmt: skip
    if any(attention.gate is not None for _, attention in spec.attentions()):
        widths["attention gate"] = query
    if mixers:
        widths["state inputs"] = max(inputs_width(mixer) for mixer in mixers)
        widths["convolved"] = max(convolved_width(mixer) for mixer in mixers)
    if mixtures:
        widest = max(one.up.out_features for one in mixtures)
        widths |= {"scores": max(one.num_experts for one in mixtures), "routed": hidden}
        widths |= {"shared": hidden, "shared gate": 1} if shared else {}
        widths |= {"expert gate": widest, "expert up": widest, "expert activated": widest}
    return widths


def most_selected(vocab_size: int) -> int:
    """Tokens whose logits exist at once: 64, so that most steps are sampled in one go, but 32 of large vocabularies."""
    return min(max(_SELECTED_LOGITS // vocab_size, _LEAST_SELECTED), _MOST_SELECTED)


def reserve_workspace(spec: LayerStack, config: ResolvedConfig, block_tokens: int, ordered: int = 0) -> Workspace:
    """The workspace of an engine, which the system takes when it is used; arguments as of `Workspace`.

    Raises InvalidRequestError, naming `max_step_tokens`, where it is more than all memory that this machine has.
    """
    has = memory_bytes()
    try:
        workspace = Workspace(spec, config, block_tokens, ordered)
    except MemoryError:
        raise _too_many_tokens(config, has, None) from None
    if workspace.size_bytes > has:
        raise _too_many_tokens(config, has, workspace.size_bytes)
    return workspace


def _too_many_tokens(config: ResolvedConfig, has_bytes: int, needed_bytes: int | None) -> InvalidRequestError:
    needed = "more" if needed_bytes is None else format_bytes(needed_bytes)
    return InvalidRequestError(
        f"max_step_tokens of {config.max_step_tokens} needs {needed} for one step, and this machine has "
        f"{format_bytes(has_bytes)} of memory",
        "max_step_tokens",
    )


# Buffers that matmuls read.
RECORDED = (
    *("normed", "attended", "activated", "selected", "routed", "expert activated"),
    *("streams", "patches", "squares", "reduced", "clipped", "ordered"),
)
# Buffers of pairs of a token and an expert, by their positions (`kernels.routing`).
ROUTED = ("routed", "expert gate", "expert up", "expert activated")


class Workspace:
    """Buffers for a step's tokens and those whose logits are wanted; records in blocks of `block_tokens`.

    The buffer "routed" holds what experts read and, once they have read it, what they make of it. "layer rows" holds
    the tokens' rows, and once these are part of "layer inputs" each layer's gate. "states" holds what a drafter reads
    beside embeddings, which are in "embedded" where they are not as wide as the stream, "handed on" what its next draft
    reads, and "fused" what it makes of its model's "streams" for it. "convolved" has a place for each token that is
    replayed too. "ordered" holds the inputs of a matrix in its own order, of which the widest has `ordered` columns.

    Attributes:
        zeros: float32, as many as a mixer with a state has inputs, never written.
        delta_scratch: uint8 [threads, whole cache lines], of the kernels of delta nets.
        turns: int64 [threads, 8], of which the first word counts a thread's exchanges with other ranks.
        max_selected: tokens whose logits, or final hidden states, exist at once.
    """

    def __init__(self, spec: LayerStack, config: ResolvedConfig, block_tokens: int, ordered: int = 0) -> None:
        max_tokens, max_rows = config.max_step_tokens, config.max_running
        self.max_selected = max_selected = most_selected(spec.vocab_size) if isinstance(spec, ModelSpec) else 0
        mixtures = [experts for _, experts in spec.mixtures()]
        self.routing = Routing(mixtures, max_tokens, block_tokens)
        self.block_tokens = block_tokens
        counts = dict.fromkeys(("selected", "logits", "handed on"), max_selected)
        counts |= dict.fromkeys(("streams", "fused"), min(max_tokens, FUSED_AT_ONCE))
        counts |= dict.fromkeys(ROUTED, num_positions(mixtures, max_tokens, block_tokens))
        counts["convolved"] = max_tokens + max_rows * state_sizes(spec, config.speculative_tokens).most_uncertain
        self.buffers: dict[str, RowBuffer] = {}
        widths = buffer_widths(spec, len(config.hidden_layers)) | ({"ordered": ordered} if ordered else {})
        for name, width in widths.items():
            tokens = counts.get(name, max_tokens)
            padded = -(-width // GROUP) * GROUP
            stride = padded + _TOKEN_PADDING
            values = aligned_zeros((tokens, stride), np.float32)
            records = RecordBuffer(tokens, padded // GROUP, block_tokens) if name in RECORDED else None
            terms = RecordBuffer(2 * tokens, padded // GROUP, block_tokens) if name in ("normed", "ordered") else None
            self.buffers[name] = RowBuffer(values, records, terms)
        self.zeros = aligned_zeros(max(inputs_width(layer.mixer) for layer in spec.layers), np.float32)
        nets = [mixer for layer in spec.layers if isinstance(mixer := layer.mixer, GatedDeltaNet)]
        stride = max((delta_scratch_bytes(net.key_size, net.value_size) for net in nets), default=0) // 64 * 64 + 64
        self.delta_scratch = aligned_zeros((config.threads, stride), np.uint8)
        self.turns = aligned_zeros((config.threads, LINE_BYTES // 8), np.int64)
        groups = len(spec.cache_groups())
        self.step = aligned_zeros(8, np.int64)
        self.rows = aligned_zeros((max_rows, ROW_FIELDS), np.int64)
        self.selected = aligned_zeros(max_selected, np.int32)
        self.seen = aligned_zeros(max_tokens, np.int32)
        self.slots = [aligned_zeros(max_tokens, np.int32) for _ in range(groups)]
        self.block_tables = [aligned_zeros((max_rows, config.max_blocks), np.int32) for _ in range(groups)]

    def record(self, fields: Record, **values: float) -> NDArray[np.int64]:
        """The record of a kernel, which reads the step; where it counts, all tokens unless `count_field` is another."""
        of_step = {"step": address(self.step), "count_field": STEP_TOKENS}
        return fields.pack({**{name: value for name, value in of_step.items() if name in fields.index}, **values})

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers, of the quantised records beside them, and of the choices of experts."""
        return self.routing.size_bytes + sum(
            buffer.values.nbytes + sum(part.size_bytes for part in (buffer.records, buffer.terms) if part is not None)
            for buffer in self.buffers.values()
        )


def num_positions(mixtures: Iterable[Experts], max_tokens: int, block_tokens: int) -> int:
    """Positions that a step's pairs can take at most: each expert's begin a block of records."""
    most = 0
    for experts in mixtures:
        pairs = max_tokens * experts.experts_per_token
        most = max(most, pairs + min(pairs, experts.num_experts) * (block_tokens - 1))
    return -(-most // block_tokens) * block_tokens


def pairs_of_item(in_features: int, block_bytes: int, block_tokens: int) -> int:
    """Pairs of an item: whole blocks of records, few enough to stay in `block_bytes` of cache, at least one block."""
    record_bytes = -(-in_features // GROUP) * RECORD_BYTES
    return max(1, min(BLOCK_TOKENS, block_bytes // record_bytes) // block_tokens) * block_tokens


class Routing:
    """Memory that all mixtures of a model use, one after another; a block of records has `block_tokens`.

    Attributes:
        chosen: int32 [tokens * experts per token], experts. weights: float32, theirs. positions: int32, of the pairs.
        starts: int64 [experts], scratch. items: int64 [items + 1, ITEM_FIELDS]. counts: int64 [COUNT_FIELDS]; see
            `routing` of the kernels.
    """

    def __init__(self, mixtures: Iterable[Experts], max_tokens: int, block_tokens: int) -> None:
        every = list(mixtures)
        pairs = max_tokens * max((each.experts_per_token for each in every), default=0)
        experts = max((each.num_experts for each in every), default=0)
        items = pairs // block_tokens + min(experts, pairs)
        self.chosen, self.positions = aligned_zeros(pairs, np.int32), aligned_zeros(pairs, np.int32)
        self.weights = aligned_zeros(pairs, np.float32)
        self.starts, self.counts = aligned_zeros(experts, np.int64), aligned_zeros(COUNT_FIELDS, np.int64)
        self.items = aligned_zeros((items + 1) * ITEM_FIELDS, np.int64)

    def forget_experts_read(self) -> None:
        self.counts[[COUNT_READ, COUNT_SORTED]] = 0

    def experts_read(self) -> float | None:
        """Experts that a mixture read in a step, on average since then; None if there was none."""
        read, mixtures = int(self.counts[COUNT_READ]), int(self.counts[COUNT_SORTED])
        return read / mixtures if mixtures else None

    @property
    def size_bytes(self) -> int:
        arrays = self.chosen, self.positions, self.weights, self.starts, self.counts, self.items
        return sum(each.nbytes for each in arrays)
