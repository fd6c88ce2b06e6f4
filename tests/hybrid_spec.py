"""A spec with a layer of every kind: attention or a convolution, dense or experts, or only one of both."""

from __future__ import annotations

from realizar.models.mixers import ShortConvolution
from realizar.models.parts import Linear, Norm
from realizar.models.spec import Attention, ExpertLinear, Experts, FeedForward, Layer, ModelSpec
from realizar.models.tensor_source import TensorSource

HIDDEN, WIDTH, EXPERTS, LENGTH, VOCAB = 8, 16, 4, 3, 32


class _Maker:
    def __init__(self) -> None:
        self.tensors: dict[str, TensorSource] = {}

    def tensor(self, name: str, *shape: int) -> str:
        self.tensors[name] = TensorSource(name, shape)
        return name

    def linear(self, name: str, rows: int, cols: int) -> Linear:
        return Linear(self.tensor(f"{name}.weight", rows, cols), rows, cols)

    def norm(self, name: str, size: int = HIDDEN) -> Norm:
        return Norm("rms", 1e-5, self.tensor(f"{name}.weight", size))

    def attention(self, name: str, window: int | None) -> Attention:
        q, k, v, o = (self.linear(f"{name}.{part}", HIDDEN, HIDDEN) for part in "qkvo")
        q_norm, sinks = self.norm(f"{name}.q_norm"), self.tensor(f"{name}.sinks", 1)
        return Attention(1, 1, HIDDEN, 1.0, q, k, v, o, window=window, q_norm=q_norm, sinks=sinks)

    def convolution(self, name: str) -> ShortConvolution:
        inputs = self.linear(f"{name}.in", 3 * HIDDEN, HIDDEN)
        kernel, bias = self.tensor(f"{name}.kernel", HIDDEN, LENGTH), self.tensor(f"{name}.bias", HIDDEN)
        return ShortConvolution(HIDDEN, LENGTH, inputs, kernel, self.linear(f"{name}.out", HIDDEN, HIDDEN), bias)

    def dense(self, name: str) -> FeedForward:
        gate, up = self.linear(f"{name}.gate", WIDTH, HIDDEN), self.linear(f"{name}.up", WIDTH, HIDDEN)
        return FeedForward("silu", up, self.linear(f"{name}.down", HIDDEN, WIDTH), gate)

    def expert_linear(self, name: str, rows: int, cols: int) -> ExpertLinear:
        return ExpertLinear(self.tensor(f"{name}.weight", EXPERTS, rows, cols), EXPERTS, rows, cols)

    def experts(self, name: str) -> Experts:
        gate, up = (self.expert_linear(f"{name}.{part}", WIDTH, HIDDEN) for part in ("gate", "up"))
        down = self.expert_linear(f"{name}.down", HIDDEN, WIDTH)
        return Experts(self.linear(f"{name}.router", EXPERTS, HIDDEN), 2, "silu", gate, up, down)


def hybrid_spec() -> ModelSpec:
    """Layers: 0 attention and dense; 1 a window and experts; 2 a convolution and dense; 3 attention; 4 experts."""
    make = _Maker()
    embedding = make.tensor("embedding", VOCAB, HIDDEN)
    layers = (
        Layer(
            make.attention("0", None), make.dense("0"), make.norm("0.input"), make.norm("0.post"), make.norm("0.pre"),
        ),
        Layer(make.attention("1", 5), make.experts("1"), make.norm("1.input"), None, make.norm("1.pre")),
        Layer(make.convolution("2"), make.dense("2"), make.norm("2.input"), None, make.norm("2.pre")),
        Layer(make.attention("3", None), None, make.norm("3.input"), residual_scale=0.5),
        Layer(None, make.experts("4"), pre_feedforward_norm=make.norm("4.pre")),
    )  # fmt: skip
    head, norm = make.linear("head", VOCAB, HIDDEN), make.norm("norm")
    return ModelSpec("hybrid", VOCAB, HIDDEN, 64, embedding, layers, norm, head, tensors=make.tensors)
