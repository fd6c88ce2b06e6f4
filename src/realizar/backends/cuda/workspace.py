"""`Workspace`: the fixed memory of a step on the device."""

from __future__ import annotations

import torch

from realizar.backends.base import FUSED_AT_ONCE
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import CHUNK_PARTS, norm_square_parts
from realizar.backends.cuda.kernels.fetch import add_rows, fetch_rows
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.inputs import ActivationBuffers
from realizar.backends.cuda.matmul.residual import epilogue_square_parts
from realizar.backends.cuda.native.chunks.source import ALONE_WARPS, MOST_WARPS
from realizar.backends.cuda.step_arrays import BRINGING, StepArrays, StepSizes
from realizar.batch import head_id_table
from realizar.models.mixers import GatedDeltaNet
from realizar.models.parts import PairedInputs
from realizar.models.spec import ModelSpec

_DEPENDENT_TOKENS = 256
_MATVEC_TOKENS = 7  # at most, of matmuls of integers
_FETCHED, _FETCHING = 1024, 256  # floats of a row that one program fetches; rows at once that may have none
LOGIT_BLOCK = 4096  # logits whose largest is found at once


class Workspace:
    """Buffers that one step uses from its first kernel to its last; two steps never run at once.

    `compute` is the element type that attention multiplies in; `attention_parts` decodes times parts of a context, at
    most.
    """

    def __init__(
        self, spec: ModelSpec, sizes: StepSizes, device: DeviceProfile, compute: torch.dtype, attention_parts: int
    ) -> None:
        where = device.torch_device
        attentions = [attention for _, attention in spec.all_attentions()]
        width = max(a.num_heads * a.head_size for a in attentions)
        nets = (layer.mixer for layer in spec.layers if isinstance(layer.mixer, GatedDeltaNet))
        widest = max((width, *(net.num_value_heads * net.value_size for net in nets)))
        heads = max(a.num_heads for a in attentions)
        self.arrays = StepArrays(sizes, device)
        self.activations = ActivationBuffers(sizes.tokens, where)
        per_token = (one.experts_per_token + (one.shared is not None) for _, one in spec.mixtures())
        pairs = sizes.tokens * max(per_token, default=0)
        self.chosen = torch.full((max(pairs, 1),), -1, dtype=torch.int32, device=where)
        self.expert_weights = torch.zeros(max(pairs, 1), device=where)
        self.hidden = torch.zeros((sizes.tokens, spec.hidden_size), device=where)
        self.kept = torch.zeros((sizes.kept, sizes.tokens, spec.hidden_size), device=where)
        self.states = torch.zeros((0 if spec.next_token is None else sizes.tokens, spec.state_size), device=where)
        apart = 0 if spec.state_size == spec.hidden_size else sizes.tokens
        self._embedded_apart = torch.zeros((apart, spec.state_size), device=where)
        fusion, reads_pairs = spec.fusion, isinstance(spec.next_token, PairedInputs)
        self.pair = torch.zeros((sizes.tokens if reads_pairs else 0, 2 * spec.hidden_size), device=where)
        features = 0 if fusion is None else fusion.linear.in_features
        self.streams = torch.zeros((min(sizes.tokens, FUSED_AT_ONCE), features), device=where)
        self.head_ids = None if spec.head_ids is None else torch.from_numpy(head_id_table(spec.head_ids)).to(where)
        own = 0 if spec.layer_inputs is None else spec.layer_inputs.projection.out_features
        self.layer_inputs = torch.zeros((sizes.tokens, own), device=where)
        self.square_sums = torch.zeros((2, sizes.tokens, norm_square_parts(spec.hidden_size)), device=where)
        self.epilogue_square_sums = torch.zeros(
            (min(sizes.tokens, _MATVEC_TOKENS), epilogue_square_parts(spec.hidden_size)), device=where
        )
        self.query = torch.zeros((sizes.tokens, width), dtype=compute, device=where)
        self.attended = torch.zeros((sizes.tokens, widest), device=where)
        self.partial_sums = torch.zeros(1, device=where)
        self.attention_parts = torch.zeros(attention_parts * width, device=where)
        self.attention_state = torch.zeros(attention_parts * heads * 2, device=where)
        kv_heads = max(a.num_kv_heads for a in attentions)
        counted = max(sizes.rows * kv_heads * ALONE_WARPS, CHUNK_PARTS * MOST_WARPS)
        self.arrivals = torch.zeros(counted, dtype=torch.int32, device=where)
        self.next_tile = torch.zeros(1, dtype=torch.int32, device=where)
        self.logits = torch.zeros((sizes.selected, spec.vocab_size), device=where)
        blocks = -(-spec.vocab_size // LOGIT_BLOCK)
        self.block_tops = torch.zeros((sizes.selected, blocks), device=where)
        self.block_ids = torch.zeros((sizes.selected, blocks), dtype=torch.int32, device=where)
        self.final_states = torch.zeros((sizes.selected, spec.state_size), device=where)
        self.sampled = torch.zeros(sizes.selected, dtype=torch.int32, device=where)
        self.last = self.arrays.last

        self._token_tops, self._token_arrivals = (
            torch.zeros(sizes.tokens, dtype=torch.int32, device=where) for _ in range(2)
        )
        self._has_dependent_launch = device.has_dependent_launch
        if where.type != "meta":  # compile what the first embeddings would wait for
            rows = torch.zeros((1, spec.hidden_size * (1 + spec.deepstack)), pin_memory=device.is_gpu)
            self.arrays.given = ((0, rows),)
            self.place_given()
            self.arrays.given = ()

    @property
    def embedded(self) -> torch.Tensor:
        """The embedding of the step's tokens: in the stream, or by itself where that is of another width."""
        return self._embedded_apart if len(self._embedded_apart) else self.hidden

    def launching(self, kind: StepKind) -> dict[str, bool]:
        """Launch options of a step's kernels: DEPENDENT if each may start while the one before it ends.

        With few tokens that hides a launch's latency (8 tokens on an H200: 4.7 to 2.8 ms a step, with other changes;
        256 of a 0.6B: 3.01 to 2.85); with many, kernels that wait take room from those that work.
        """
        if self._has_dependent_launch and kind.tokens <= _DEPENDENT_TOKENS:
            return {"DEPENDENT": True, "launch_pdl": True}
        return {"DEPENDENT": False}

    def place_states(self, states: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Start to copy what a drafter reads beside the step's tokens to where its kernels read it.

        Of several states of each token it is that of `places`, int32 [tokens].
        """
        if places is None:
            self.states[: len(states)].copy_(states, non_blocking=True)
        else:
            torch.index_select(states, 0, places, out=self.states[: len(places)])

    def place_given(self) -> None:
        """Start to fetch the step's given embeddings to where the embedding leaves them."""
        width = self.hidden.shape[1]
        for first, values in self.arrays.given:
            grid = len(values), -(-width // _FETCHED)
            fetch_rows[grid](values, values.stride(0), self.hidden[first:], width, BLOCK=_FETCHED)

    def add_features(self, layer: int, kind: StepKind) -> None:
        """Start to add what the step's given embeddings bring for one of the first layers.

        Graphs of steps with chunks have this, which then finds out what there is, and those of decodes have not.
        """
        if kind.tiles or self.arrays.brings_features:
            width = self.hidden.shape[1]
            grid = min(len(self.hidden), _FETCHING), -(-width // _FETCHED)
            add_rows[grid](
                self.arrays["header"], self.arrays.brought, self.hidden, width, (1 + layer) * width, COUNT=BRINGING,
                BLOCK=_FETCHED,
            )  # fmt: skip

    @property
    def token_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Counters of `kernels.store_inputs.token_complete`."""
        return self._token_tops, self._token_arrivals

    def size_partials(self, floats: int) -> None:
        if floats > self.partial_sums.numel():
            self.partial_sums = torch.zeros(floats, device=self.partial_sums.device)

    def partials(self, splits: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """dtype [splits, tokens, width]: the one buffer that matmuls write and the kernel after them reads."""
        return self.partial_sums.view(dtype)[: splits * tokens * width].view(splits, tokens, width)

    @property
    def size_bytes(self) -> int:
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) + self.activations.size_bytes
