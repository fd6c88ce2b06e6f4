"""`shard` cuts the description of a model into those of ranks, which compute it together.

Each rank has some heads, some features between the up and the down projections, and some ids of the vocabulary, with
the rows and columns of the matrices that belong to them. Its outputs of a layer's branch are a part of each sum: those
of all ranks added up are the branch's. `backends.program` says where they are added up.

Experts are cut like a dense feed-forward, so that each rank has a part of every expert: whatever a token chooses, all
ranks have the same work, and the router, which all have whole, needs no word about where an expert lives. Where equal
parts are not whole blocks of the down projection's weights, some ranks have a block more than others, in every second
layer the other ones. Where experts have fewer blocks than there are ranks, those that are left over have a copy of one,
by which their sums are zeros: the others would not end sooner. Parts of other feed-forwards may be narrower than a
block, which loading then refuses by name; of what experts share the first ranks have a block each then.

All ranks have norms, routers, the shared expert's gate, and further inputs of layers with their gates whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import UnsupportedModelError
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.parts import Linear, Norm, Share
from realizar.models.spec import AnyFeedForward, Attention, ExpertLinear, Experts, FeedForward, Layer, Mixer, ModelSpec
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization.source import Run
from realizar.quantization.tensors import stack_layout

_Matrix = TypeVar("_Matrix", Linear, ExpertLinear)


def shard(spec: ModelSpec, rank: int, ranks: int, checkpoint: Checkpoint | None = None) -> ModelSpec:
    """The part of a whole model that one of several ranks computes, of the checkpoint's blocks of weights.

    Without a checkpoint blocks are of one weight.

    Heads of keys and values are copied where there are more ranks than heads, and so are the key heads of gated delta
    nets. The last rank may have fewer ids of the vocabulary. Biases after sums of all ranks are the first rank's.

    Raises:
        UnsupportedModelError: ranks do not divide the model; names the architecture, the layer and what they do not.
        ValueError: there is no such rank, or the model is a part already.
    """
    if not 0 <= rank < ranks or spec.share.ranks != 1:
        raise ValueError(f"rank {rank} of {ranks} of a model that {spec.share.ranks} share")
    return spec if ranks == 1 else _Cutter(spec, rank, ranks, checkpoint).cut()


class _Cutter:
    def __init__(self, spec: ModelSpec, rank: int, ranks: int, checkpoint: Checkpoint | None) -> None:
        self._spec, self._rank, self._ranks, self._checkpoint = spec, rank, ranks, checkpoint
        self._where, self._index = "", 0
        self._tensors: dict[TensorName, TensorSource] = dict(spec.tensors)
        self._ignored: set[str] = set(spec.ignored_tensors)

    def cut(self) -> ModelSpec:
        spec = self._spec
        of_last, following = (self._first_id(rank) for rank in (self._ranks - 1, self._rank + 1))
        if of_last >= spec.vocab_size:
            raise self._refused(f"a vocabulary of {spec.vocab_size} ids", "can't share: the last would have none")
        ids = [(self._first_id(self._rank), min(following, spec.vocab_size))]
        head, share = spec.head, Share(self._rank, self._ranks)
        if replace(spec, share=share).cuts_embedding:
            self._keep(spec.embedding, rows=ids)
        elif spec.tied:
            head = replace(head, weight=f"{head.weight}.part")
            self._spec = spec = replace(spec, tensors={**spec.tensors, head.weight: spec.tensors[spec.embedding]})
        head = self._rows(head, ids)
        layers = tuple(self._layer(index, layer) for index, layer in enumerate(spec.layers))
        return replace(
            spec, layers=layers, head=head, tensors=self._tensors, ignored_tensors=frozenset(self._ignored), share=share
        )

    def _first_id(self, rank: int) -> int:
        return replace(self._spec, share=Share(rank, self._ranks)).first_id

    def _layer(self, index: int, layer: Layer) -> Layer:
        self._where, self._index = f"layer {index} has ", index
        mixer = None if layer.mixer is None else self._mixer(layer.mixer)
        return replace(layer, mixer=mixer, feed_forward=self._feed_forward(layer.feed_forward))

    def _mixer(self, part: Mixer) -> Mixer:
        if isinstance(part, GatedDeltaNet):
            return self._delta_net(part)
        if isinstance(part, ShortConvolution):
            return self._convolution(part)
        heads, kv_heads = self._heads(part)
        queries, keys = ([_times(heads, part.head_size)], [_times(kv_heads, part.head_size)])
        part = replace(part, num_heads=_length(heads), num_kv_heads=_length(kv_heads))
        q, o = self._rows(part.q, queries), self._columns(part.o, queries)
        if isinstance(part, SharedAttention):
            return replace(part, q=q, o=o)
        self._keep(part.sinks, rows=[heads])
        if part.qk_norm_axis == "token":
            self._norm(part.q_norm, queries)
            self._norm(part.k_norm, keys)
        gate = None if part.gate is None else self._rows(part.gate, queries)
        return replace(part, q=q, k=self._rows(part.k, keys), v=self._rows(part.v, keys), o=o, gate=gate)

    def _heads(self, part: Attention | SharedAttention) -> tuple[Run, Run]:
        heads = self._even(part.num_heads, "heads of queries")
        if part.num_kv_heads % self._ranks and self._ranks % part.num_kv_heads == 0:
            of_rank = self._rank * part.num_kv_heads // self._ranks
            return heads, (of_rank, of_rank + 1)
        return heads, self._even(part.num_kv_heads, "heads of keys and values")

    def _convolution(self, part: ShortConvolution) -> ShortConvolution:
        channels = self._even(part.channels, "channels of a convolution")
        thirds = [_after(channels, third * part.channels) for third in range(3)]
        self._keep(part.kernel, rows=[channels])
        self._keep(part.bias, rows=[channels])
        in_proj, out_proj = self._rows(part.in_proj, thirds), self._columns(part.out_proj, [channels])
        return replace(part, channels=_length(channels), in_proj=in_proj, out_proj=out_proj)

    def _delta_net(self, part: GatedDeltaNet) -> GatedDeltaNet:
        key_heads, value_heads = self._delta_heads(part)
        keys = [_times(key_heads, part.key_size)]
        heads = _runs(value_heads)
        values = [_times(run, part.value_size) for run in heads]
        all_keys = part.num_key_heads * part.key_size
        channels = [*keys, _after(keys[0], all_keys), *(_after(run, 2 * all_keys) for run in values)]
        self._keep(part.kernel, rows=channels)
        for name in (part.decay_bias, part.rate):
            self._keep(name, rows=heads)
        return replace(
            part, num_key_heads=_length(key_heads), num_value_heads=len(value_heads),
            q=self._rows(part.q, keys), k=self._rows(part.k, keys),
            v=self._rows(part.v, values), z=self._rows(part.z, values),
            beta=self._rows(part.beta, heads), decay=self._rows(part.decay, heads),
            out=self._columns(part.out, values),
        )  # fmt: skip

    def _delta_heads(self, part: GatedDeltaNet) -> tuple[Run, list[int]]:
        """Key heads, and the value heads that read them; of one key head those that are this rank's."""
        copies, rest = divmod(self._ranks, part.num_key_heads)
        shared = copies > 1 and not rest
        what = "key heads of a gated delta net"
        key_heads = _after((0, 1), self._rank // copies) if shared else self._even(part.num_key_heads, what)
        ratio = part.num_value_heads // part.num_key_heads
        read = [head % part.num_key_heads if part.tiled else head // ratio for head in range(part.num_value_heads)]
        readers = [head for head, key in enumerate(read) if key in range(*key_heads)]
        if not shared:
            return key_heads, readers
        self._even(part.num_value_heads, "value heads of a gated delta net")
        own = len(readers) // copies
        first = self._rank % copies * own
        return key_heads, readers[first : first + own]

    def _feed_forward(self, part: AnyFeedForward | None) -> AnyFeedForward | None:
        if isinstance(part, Experts):
            run, scale = self._expert_features(part)
            width, part = [run], self._with_shared(replace(part, scale=scale))
            gate = None if part.gate is None else self._rows(part.gate, width)
            return replace(part, gate=gate, up=self._rows(part.up, width), down=self._columns(part.down, width))
        if part is None:
            return None
        return self._dense(part, self._features(part.up.out_features, part.down.weight, "features of a feed-forward"))

    def _dense(self, part: FeedForward, run: Run) -> FeedForward:
        gate = None if part.gate is None else self._rows(part.gate, [run])
        return replace(part, gate=gate, up=self._rows(part.up, [run]), down=self._columns(part.down, [run]))

    def _with_shared(self, part: Experts) -> Experts:
        """With a rank's part of the feed-forward that experts share; of fewer blocks than ranks the first ones have."""
        shared = part.shared
        if shared is None:
            return part
        blocks, block = self._blocks(shared.up.out_features, shared.down.weight)
        if not 0 < blocks < self._ranks or part.norms is not None:
            run = self._features(shared.up.out_features, shared.down.weight, "features of a feed-forward")
            return replace(part, shared=self._dense(shared, run))
        if self._rank < blocks:
            return replace(part, shared=self._dense(shared, _times((self._rank, self._rank + 1), block)))
        for linear in (*shared.linears(), *(() if part.shared_gate is None else (part.shared_gate,))):
            self._drop(linear.weight)
            self._drop(linear.bias)
        return replace(part, shared=None, shared_gate=None)

    def _expert_features(self, part: Experts) -> tuple[Run, float]:
        """A rank's features of each expert, and the scale of what it makes of them."""
        count, down = part.up.out_features, part.down
        blocks, block = self._blocks(count, down.weight)
        if not 0 < blocks < self._ranks or down.bias is not None:
            return self._features(count, down.weight, "features of an expert"), part.scale
        place = self._rank % blocks
        return _times((place, place + 1), block), part.scale if place == self._rank else 0.0

    def _features(self, count: int, down: TensorName, what: str) -> Run:
        """Whole blocks of the down projection's columns, as evenly as they go."""
        blocks, block = self._blocks(count, down)
        if blocks < self._ranks or not blocks % self._ranks:
            return self._even(count, what)
        place = self._ranks - 1 - self._rank if self._index % 2 else self._rank
        return _times((place * blocks // self._ranks, (place + 1) * blocks // self._ranks), block)

    def _blocks(self, count: int, down: TensorName) -> tuple[int, int]:
        """The blocks of so many columns, and a block's columns; none where they are single weights, or not whole."""
        block = 1 if self._checkpoint is None else _block_size(self._checkpoint, self._spec.tensors[down])
        return (0 if block == 1 or count % block else count // block), block

    def _rows(self, matrix: _Matrix, runs: Sequence[Run]) -> _Matrix:
        self._keep(matrix.weight, rows=runs)
        self._keep(matrix.bias, rows=runs)
        return replace(matrix, out_features=sum(map(_length, runs)))

    def _columns(self, matrix: _Matrix, runs: Sequence[Run]) -> _Matrix:
        """The matrix with some of its columns. One rank alone adds the bias, and no other has it."""
        self._keep(matrix.weight, columns=runs)
        bias = matrix.bias
        if self._rank:
            self._drop(bias)
            bias = None
        return replace(matrix, in_features=sum(map(_length, runs)), bias=bias)

    def _drop(self, name: TensorName | None) -> None:
        """Leave a tensor to other ranks."""
        if name is not None:
            self._tensors.pop(name, None)
            self._ignored.update(self._spec.tensors[name].names)

    def _norm(self, norm: Norm | None, runs: Sequence[Run]) -> None:
        if norm is not None:
            self._keep(norm.weight, rows=runs)
            self._keep(norm.bias, rows=runs)

    def _keep(
        self, name: TensorName | None, rows: Sequence[Run] | None = None, columns: Sequence[Run] | None = None
    ) -> None:
        if name is not None:
            self._tensors[name] = self._spec.tensors[name].cut(rows, columns)

    def _even(self, count: int, what: str) -> Run:
        each, rest = divmod(count, self._ranks)
        if rest:
            raise self._refused(f"{count} {what}", "can't share evenly")
        return self._rank * each, (self._rank + 1) * each

    def _refused(self, what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._spec.architecture}: {self._where}{what}, which {self._ranks} ranks {why}")


def _block_size(checkpoint: Checkpoint, source: TensorSource) -> int:
    return stack_layout(checkpoint, source.names).block_size


def _length(run: Run) -> int:
    return run[1] - run[0]


def _times(run: Run, size: int) -> Run:
    return run[0] * size, run[1] * size


def _after(run: Run, places: int) -> Run:
    return run[0] + places, run[1] + places


def _runs(numbers: Iterable[int]) -> list[Run]:
    runs: list[Run] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
