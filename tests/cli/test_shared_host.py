"""Memory of the host that several models share: for weights that sleep, and for snapshots of states."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from realizar.cli.several_models import _sharers, _sharing
from realizar.config import EngineConfig
from realizar.server.models.shelved import KnownModel
from server.models.shelf_case import known

FREE = 80 << 30


def model(device: str = "cuda:0", *, host: int = 1, **options: int) -> KnownModel:
    made = known("a", 1, device=device, host=host)
    return replace(made, load=msgspec.structs.replace(made.load, config=EngineConfig(**options)))


@pytest.mark.parametrize(("sleep_bytes", "sharers"), [(0, 2), (FREE // 2, 2), (70 << 30, 2), ((70 << 30) + 1, 0)])
def test_what_sleep_may_take_is_not_promised_twice(sleep_bytes: int, sharers: int) -> None:
    """Models on the CPU take none; snapshots take an eighth of 80 GiB."""
    assert _sharers([model(), model("cpu", host=0), model("cuda:1")], sleep_bytes, FREE) == sharers


def test_each_engine_knows_how_many_share_the_host() -> None:
    assert _sharing(model(), 3).load.config == EngineConfig(host_sharers=3)
    assert _sharing(model(), 0).load.config == EngineConfig(host_snapshot_bytes=0)
    for as_it_is in (model(host_snapshot_bytes=5), model("cpu", host=0)):
        assert _sharing(as_it_is, 3) == _sharing(as_it_is, 0) == as_it_is
