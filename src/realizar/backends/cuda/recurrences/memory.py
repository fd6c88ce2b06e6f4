"""`StateMemory`: the states of rows on the device, and the rings of their last inputs."""

from __future__ import annotations

import logging

import torch

from realizar.backends.cuda.recurrences.host_snapshots import HostSnapshots
from realizar.backends.devices import TRAITS
from realizar.backends.resolved_config import ResolvedConfig
from realizar.batch import StateMoves
from realizar.config import EngineConfig
from realizar.errors import CapacityError, KernelError
from realizar.models.mixers import GatedDeltaNet, ShortConvolution
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)
Recurrent = GatedDeltaNet | ShortConvolution


def recurrent_layers(spec: ModelSpec) -> dict[int, Recurrent]:
    mixers = ((index, layer.mixer) for index, layer in enumerate(spec.layers))
    return {index: mixer for index, mixer in mixers if isinstance(mixer, GatedDeltaNet | ShortConvolution)}


def ring_tokens(spec: ModelSpec, config: EngineConfig) -> int:
    """Tokens whose inputs a ring keeps: those that a convolution sees, all that may be undone, and one more.

    A step that undoes the most reads all but that one's place, and may write the new token's there meanwhile.
    """
    longest = max((mixer.length for mixer in recurrent_layers(spec).values()), default=1)
    return longest - 1 + (1 + config.most_drafts) + 1


def ring_width(mixer: Recurrent) -> int:
    if isinstance(mixer, ShortConvolution):
        return mixer.channels
    return mixer.channels + 2 * mixer.num_value_heads


def state_floats(mixer: Recurrent) -> int:
    if isinstance(mixer, ShortConvolution):
        return 0
    return mixer.num_value_heads * mixer.key_size * mixer.value_size


def slot_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of a row's state, or of a snapshot, in all layers."""
    ring = ring_tokens(spec, config)
    return 4 * sum(state_floats(mixer) + ring * ring_width(mixer) for mixer in recurrent_layers(spec).values())


def rows_within(spec: ModelSpec, config: EngineConfig, left_bytes: int) -> int:
    """Rows where none are configured: as many as of any model, or the largest half, quarter and so on of them.

    States of all rows take a third of `left_bytes`, those beside the weights, at most: they are there whether or not so
    many sequences run, and the KV cache needs the rest.
    """
    rows, state = TRAITS["cuda"].rows, slot_bytes(spec, config)
    while rows > 1 and rows * state > left_bytes // 3:
        rows //= 2
    return rows


class StateMemory:
    """A slot for each row and each snapshot: row r has slot r, and snapshot s has slot `rows + s`.

    Attributes:
        host: copies of slots in the host's memory; None where there are none, which is logged where the host can't have
            the default's.
        states: of each layer float32 [slots, value heads, key size, value size]; empty for a convolution.
        rings: of each layer float32 [slots, ring, width]: what each of a sequence's last tokens brought.
        num_host_snapshots: those that there is memory for.

    Raises:
        CapacityError, KernelError: as of `HostSnapshots`, where their memory was configured.
    """

    def __init__(
        self, spec: ModelSpec, config: ResolvedConfig, device: torch.device, num_snapshots: int = 0,
        num_host_snapshots: int = 0,
    ) -> None:  # fmt: skip
        self.num_snapshots, self.ring = num_snapshots, ring_tokens(spec, config)
        self._rows, slots = config.max_running, config.max_running + num_snapshots
        self.states: dict[int, torch.Tensor] = {}
        self.rings: dict[int, torch.Tensor] = {}
        for layer, mixer in recurrent_layers(spec).items():
            shape: tuple[int, ...] = (0,)
            if isinstance(mixer, GatedDeltaNet):
                shape = slots, mixer.num_value_heads, mixer.key_size, mixer.value_size
            self.states[layer] = torch.zeros(shape, device=device)
            self.rings[layer] = torch.zeros((slots, self.ring, ring_width(mixer)), device=device)
        self._tensors = [each for each in (*self.states.values(), *self.rings.values()) if each.numel()]
        self.host: HostSnapshots | None = None
        if num_host_snapshots:
            try:
                self.host = HostSnapshots(self._tensors, self._rows, num_host_snapshots)
            except (CapacityError, KernelError) as error:
                if config.host_snapshot_bytes is not None:
                    raise
                _LOG.warning("no snapshot of a state waits in the host's memory: %s", error)
        self.num_host_snapshots = 0 if self.host is None else num_host_snapshots

    def begin(self, moves: StateMoves) -> None:
        if self.host is not None:
            self.host.begin(moves)
        self._copy([(self._rows + snapshot, row) for row, snapshot in moves.restored])

    def end(self, moves: StateMoves) -> None:
        """Start the copies with which a step ends: rows' states to snapshots."""
        if self.host is not None:
            self.host.end()
        self._copy([(row, self._rows + snapshot) for row, snapshot in moves.taken])

    @property
    def snapshots(self) -> list[torch.Tensor]:
        """States and rings of each layer, [snapshots, ...]."""
        return [tensor[self._rows :] for tensor in self._tensors]

    @property
    def snapshot_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self._tensors)

    def time_fetch(self) -> float:
        """Seconds in which a host snapshot becomes the state of row 0, which is lost; RuntimeError without any."""
        if self.host is None:
            raise RuntimeError("there are no snapshots in the host's memory")
        return self.host.time_fetch()

    def close(self) -> None:
        if self.host is not None:
            self.host.close()

    @property
    def size_bytes(self) -> int:
        tensors = (*self.states.values(), *self.rings.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            for tensor in self._tensors:
                tensor[target].copy_(tensor[source])
