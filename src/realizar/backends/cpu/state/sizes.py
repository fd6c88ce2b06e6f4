"""Sizes of the states that layers keep of a row. Standard library and the spec."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cpu.activation_layout import GROUP
from realizar.models.mixers import GatedDeltaNet, ShortConvolution
from realizar.models.spec import LayerStack, Mixer

_LINE_FLOATS = 16  # float32 of a cache line: threads never share one of two layers


@dataclass(frozen=True, slots=True)
class LayerState:
    """Float32 that a layer keeps of a row: in its state, and of one uncertain token, which brings the state past it."""

    state: int
    replay: int


def layer_states(spec: LayerStack) -> dict[int, LayerState]:
    """The states of the layers that have one, by their index, in whole cache lines.

    A short convolution keeps its last `length - 1` inputs, and of an uncertain token its input. A gated delta net keeps
    the last inputs of its convolution and a matrix for each value head, and of an uncertain token the input of the
    convolution, and beta and decay of each value head.
    """
    found = {}
    for index in spec.state_layers():
        mixer = spec.layers[index].mixer
        if isinstance(mixer, ShortConvolution):
            found[index] = LayerState(_lines((mixer.length - 1) * mixer.channels), _lines(mixer.channels))
        elif isinstance(mixer, GatedDeltaNet):
            matrices = mixer.num_value_heads * mixer.key_size * mixer.value_size
            found[index] = LayerState(
                convolution_floats(mixer) + _lines(matrices),
                _lines(mixer.channels + 2 * mixer.num_value_heads),
            )
    return found


def convolution_floats(mixer: GatedDeltaNet) -> int:
    """Float32 of a delta net's state before its matrices: the last inputs of the convolution, in whole cache lines."""
    return _lines((mixer.length - 1) * mixer.channels)


def input_columns(mixer: GatedDeltaNet) -> tuple[int, ...]:
    """Where the outputs of each input matmul begin in a token's row, and where they end.

    q, k and v lie side by side. The others begin at whole groups, as matmuls write whole tiles.
    """
    columns = [0, mixer.q.out_features, mixer.q.out_features + mixer.k.out_features]
    end = mixer.channels
    for linear in (mixer.z, mixer.beta, mixer.decay):
        columns.append(-(-end // GROUP) * GROUP)
        end = columns[-1] + linear.out_features
    return (*columns, -(-end // GROUP) * GROUP)


def inputs_width(mixer: Mixer | None) -> int:
    """Outputs of the matmuls with which a mixer with a state begins, for a token."""
    if isinstance(mixer, ShortConvolution):
        return mixer.in_proj.out_features
    return input_columns(mixer)[-1] if isinstance(mixer, GatedDeltaNet) else 0


def convolved_width(mixer: Mixer | None) -> int:
    """Float32 of a token between a delta net's convolution and its recurrence: q, k, v, beta, decay, and q @ k."""
    if not isinstance(mixer, GatedDeltaNet):
        return 0
    return mixer.channels + 2 * mixer.num_value_heads + mixer.num_key_heads


def output_width(mixer: Mixer | None) -> int:
    """The number of values that a mixer with a state gives its last matmul, for a token."""
    if isinstance(mixer, ShortConvolution):
        return mixer.channels
    return mixer.num_value_heads * mixer.value_size if isinstance(mixer, GatedDeltaNet) else 0


def _lines(floats: int) -> int:
    return -(-floats // _LINE_FLOATS) * _LINE_FLOATS


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of all layers' states; at most `most_uncertain` tokens of a row in one step may be undone."""

    layers: dict[int, LayerState]
    most_uncertain: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row's live state, or of a snapshot, in all layers."""
        return 4 * sum(layer.state for layer in self.layers.values())

    @property
    def replay_bytes(self) -> int:
        """Bytes beside it, of a row's uncertain tokens in all layers."""
        return 4 * self.most_uncertain * sum(layer.replay for layer in self.layers.values())

    @property
    def row_bytes(self) -> int:
        return self.slot_bytes + self.replay_bytes


def state_sizes(spec: LayerStack, speculative_tokens: int) -> StateSizes:
    """The sizes for rows with so many drafts; the last token before them may be computed again."""
    return StateSizes(layer_states(spec), speculative_tokens + 1)
