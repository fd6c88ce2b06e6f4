"""A gated delta net as checkpoints hold it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from realizar.models.dimensions import MAX_CONVOLUTION, MAX_HEAD_SIZE, MAX_HEADS
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.mixers import GatedDeltaNet
from realizar.models.parts import Linear
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_source import TensorName, TensorSource


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes of a model's gated delta nets; see `GatedDeltaNet`."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    length: int

    @property
    def ratio(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_size


def read_delta_sizes(hparams: HyperParameters) -> DeltaSizes:
    """Read and check the sizes, which a GGUF file has under the names of other recurrences."""
    is_gguf = hparams.is_gguf
    if is_gguf:
        key_heads = hparams.integer("ssm.group_count", None, high=MAX_HEADS)
        value_heads = hparams.integer("ssm.time_step_rank", None, high=MAX_HEADS)
        key_size = hparams.integer("ssm.state_size", None, high=MAX_HEAD_SIZE)
        values = hparams.integer("ssm.inner_size", None, high=MAX_HEADS * MAX_HEAD_SIZE)
        if values % value_heads:
            raise hparams.malformed("ssm.inner_size", None, f"{value_heads} value heads do not divide {values} values")
        value_size = values // value_heads
    else:  # with the defaults of transformers
        key_heads = hparams.integer(None, "linear_num_key_heads", high=MAX_HEADS, default=16)
        value_heads = hparams.integer(None, "linear_num_value_heads", high=MAX_HEADS, default=32)
        key_size = hparams.integer(None, "linear_key_head_dim", high=MAX_HEAD_SIZE, default=128)
        value_size = hparams.integer(None, "linear_value_head_dim", high=MAX_HEAD_SIZE, default=128)
    if value_heads % key_heads:
        raise hparams.malformed(
            "ssm.time_step_rank", "linear_num_value_heads",
            f"the {key_heads} key heads do not divide the {value_heads} value heads",
        )  # fmt: skip
    keys = "ssm.conv_kernel", "linear_conv_kernel_dim"
    if is_gguf:
        length = hparams.integer(*keys, low=2, high=MAX_CONVOLUTION)
    else:
        length = hparams.integer(*keys, low=2, high=MAX_CONVOLUTION, default=4)
    return DeltaSizes(key_heads, value_heads, key_size, value_size, length)


def build_delta_net(
    builder: SpecBuilder, index: int, sizes: DeltaSizes, *, alternating: bool, tiled: bool
) -> GatedDeltaNet:
    """The gated delta net of layer `index`; for `tiled` see `GatedDeltaNet`.

    Args:
        alternating: one matrix has q, k, v and z of each key head in turn, unless it is stored apart, and another one
            beta and decay; else q, k and v lie one below the other, and the others by themselves.
    """
    base = f"model.layers.{index}.linear_attn"
    q, k, v, z = _values(builder, base, sizes, alternating=alternating)
    beta, decay = _gates(builder, base, sizes, alternating=alternating)
    norm = replace(builder.norm(f"{base}.norm", sizes.value_size), weight_offset=0.0)
    return GatedDeltaNet(
        num_key_heads=sizes.num_key_heads,
        num_value_heads=sizes.num_value_heads,
        key_size=sizes.key_size,
        value_size=sizes.value_size,
        length=sizes.length,
        q=q,
        k=k,
        v=v,
        z=z,
        beta=beta,
        decay=decay,
        kernel=builder.kernel(f"{base}.conv1d", 2 * sizes.keys + sizes.values, sizes.length),
        decay_bias=_vector(builder, index, "dt_bias", "ssm_dt.bias", sizes.num_value_heads),
        rate=_vector(builder, index, "A_log", "ssm_a", sizes.num_value_heads),
        norm=norm,
        out=builder.linear(f"{base}.out_proj", builder.sizes.hidden_size, sizes.values, bias=False),
        rate_is_log=not builder.hparams.is_gguf,
        tiled=tiled,
    )


def _values(builder: SpecBuilder, base: str, sizes: DeltaSizes, *, alternating: bool) -> list[Linear]:
    hidden, own = builder.sizes.hidden_size, sizes.ratio * sizes.value_size
    names = [f"{base}.in_proj_{part}" for part in "qkvz"]
    if alternating and not builder.has(f"{base}.in_proj_qkv.weight"):
        runs = (sizes.key_size, sizes.key_size, own, own)
        parts = list(zip(names, runs, strict=True))
        return builder.alternating(f"{base}.in_proj_qkvz", parts, sizes.num_key_heads, hidden, bias=False)
    parts = list(zip(names[:3], (sizes.keys, sizes.keys, sizes.values), strict=True))
    z = builder.linear(names[3], sizes.values, hidden, bias=False)
    return [*builder.fused(f"{base}.in_proj_qkv", parts, hidden, bias=False), z]


def _gates(builder: SpecBuilder, base: str, sizes: DeltaSizes, *, alternating: bool) -> list[Linear]:
    hidden, names = builder.sizes.hidden_size, [f"{base}.in_proj_{part}" for part in "ba"]
    if alternating:
        parts = [(name, sizes.ratio) for name in names]
        return builder.alternating(f"{base}.in_proj_ba", parts, sizes.num_key_heads, hidden, bias=False)
    return [builder.linear(name, sizes.num_value_heads, hidden, bias=False) for name in names]


def _vector(builder: SpecBuilder, index: int, name: str, gguf: str, size: int) -> TensorName:
    """A vector whose name ends neither in `weight` nor, in both formats, in `bias`."""
    canonical = f"model.layers.{index}.linear_attn.{name}"
    stored = f"blk.{index}.{gguf}" if builder.hparams.is_gguf else builder.prefixed(canonical)
    return builder.note(canonical, TensorSource(stored, (size,)))
