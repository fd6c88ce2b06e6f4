"""The places at which a trace reads the residual stream: where each block of a model leaves it."""

from __future__ import annotations

from hybrid_spec import hybrid_spec
from realizar.backends.step_values import stage_names


def test_every_kind_of_block_has_its_name() -> None:
    assert stage_names(hybrid_spec()) == [
        "layer 0 attention input",
        "layer 0 feed-forward input",
        "layer 1 attention input",
        "layer 1 experts input",
        "layer 2 short convolution input",
        "layer 2 feed-forward input",
        "layer 3 attention input",
        "layer 4 experts input",
        "last layer output",
    ]
