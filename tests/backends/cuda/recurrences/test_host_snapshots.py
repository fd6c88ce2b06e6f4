"""Snapshots in the host's memory, by the copies that `StateMoves` names; on a GPU beside other work of the device."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.recurrences import host_snapshots  # noqa: E402
from realizar.backends.cuda.recurrences import memory as recurrent_memory  # noqa: E402
from realizar.backends.cuda.recurrences.host_snapshots import HostSnapshots  # noqa: E402
from realizar.backends.cuda.recurrences.memory import StateMemory  # noqa: E402
from realizar.batch import StateMoves  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import CapacityError, KernelError  # noqa: E402
from resolving import resolved  # noqa: E402

RECIPE = Recipe(
    32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="F32", windows=(None,) * 3,
    recurrent=("delta", "convolution"), value_heads=4, key_size=16, value_size=16,
)  # fmt: skip
ROWS, SNAPSHOTS, ON_HOST = 3, 4, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Case:
    """States whose slots all have one number: the last that was written to the slot."""

    def __init__(self, device: str, configured: int | None = None) -> None:
        spec, checkpoint = random_model(RECIPE)
        wanted = EngineConfig(threads=1, max_running=ROWS, context_length=256, host_snapshot_bytes=configured)
        config = resolved(spec, checkpoint, wanted, "cuda")
        self.memory = StateMemory(spec, config, torch.device(device), SNAPSHOTS, ON_HOST)
        self.tensors = [each for each in (*self.memory.states.values(), *self.memory.rings.values()) if each.numel()]

    def fill(self, slot: int, number: float) -> None:
        for tensor in self.tensors:
            tensor[slot] = number

    def step(self, moves: StateMoves, **rows: float) -> None:
        """A step that leaves numbers in rows (`row0=1.0`)."""
        self.memory.begin(moves)
        for name, number in rows.items():
            self.fill(int(name.removeprefix("row")), number)
        self.memory.end(moves)

    def number(self, slot: int) -> float:
        """What every element of a slot is."""
        values = torch.cat([tensor[slot].flatten().cpu() for tensor in self.tensors])
        assert bool((values == values[0]).all())
        return float(values[0])

    def snapshot(self, snapshot: int) -> float:
        return self.number(ROWS + snapshot)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[32 << 20, 1], ids=["one-piece", "pieces"])
def case(device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """The snapshots lie in one piece of the host's memory, or each in one of its own."""
    monkeypatch.setattr(host_snapshots, "_PIECE_BYTES", request.param)
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    made = Case(device)
    yield made
    made.memory.close()


def test_a_snapshot_leaves_the_device_and_comes_back(case: Case) -> None:
    """Another is written over it in the step in which it leaves."""
    case.step(StateMoves(taken=((0, 2),)), row0=7.0)
    case.step(StateMoves(taken=((1, 2),), stored=((2, 4),)), row1=8.0)
    assert case.snapshot(2) == 8.0
    case.step(StateMoves(fetched=((2, 4),)))
    assert case.number(2) == 7.0
    assert [case.number(row) for row in range(2)] == [7.0, 8.0]


def test_what_is_fetched_is_kept_where_another_one_was(case: Case) -> None:
    """All copies of a step together: none sees what a later one writes."""
    case.step(StateMoves(taken=((0, 0), (1, 1))), row0=1.0, row1=2.0)
    case.step(StateMoves(taken=((0, 0),), stored=((0, 3),)), row0=3.0)  # 1 is on the host
    moves = StateMoves(
        restored=((1, 0),), fetched=((0, 3),), stored=((1, 2), (0, 1)), kept=((0, 1),), taken=((2, 0),)
    )  # fmt: skip
    case.step(moves, row2=5.0)
    assert [case.number(row) for row in range(3)] == [1.0, 3.0, 5.0]
    assert [case.snapshot(each) for each in range(2)] == [5.0, 1.0]
    for host_snapshot, number in ((1, 3.0), (2, 2.0), (3, 1.0)):
        case.step(StateMoves(fetched=((0, host_snapshot),)))
        assert case.number(0) == number


def test_many_steps_in_a_row(case: Case) -> None:
    """No one waits for the device between them: copies are ordered there."""
    for number in range(200):
        begins = () if number < ON_HOST else ((1, number % ON_HOST),)  # stored by the step before
        stored = ((0, (number + 1) % ON_HOST),) if number else ()  # taken by the step before
        case.step(StateMoves(fetched=begins, stored=stored, taken=((0, 0),)), row0=float(number))
        if begins and number % 17 == 0:
            assert case.number(1) == number - 2
    assert case.snapshot(0) == 199.0


def test_a_fetch_takes_time(case: Case) -> None:
    host = case.memory.host
    assert host is not None
    assert host.size_bytes == ON_HOST * sum(4 * tensor[0].numel() for tensor in case.tensors)
    assert host.time_fetch() > 0


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would give the addresses, and end a process when their memory is pinned."""
    monkeypatch.setattr(host_snapshots, "free_memory_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"has no 1\.\d+ k.*, with 1\S* k?B free: lower host_snapshot_bytes$"):
        HostSnapshots([torch.zeros((4, 100))], 2, 3)
    assert HostSnapshots([torch.zeros((4, 100))], 2, 2).size_bytes == 800


class OnGPU:
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda")
    shape = (4, 100)

    def __getitem__(self, slot: int) -> torch.Tensor:
        return torch.zeros(100)


class Pins:
    """A driver that knows what is pinned."""

    pinned: dict[int, int]
    most: int

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"

    def pin(self, address: int, size_bytes: int) -> None:
        if len(self.pinned) >= self.most:
            raise KernelError("pinning memory of the host: out of memory")
        assert address % 4096 == size_bytes % 4096 == 0
        assert all(address >= other + size or other >= address + size_bytes for other, size in self.pinned.items())
        self.pinned[address] = size_bytes

    def synchronize(self) -> None:
        self.waited = True

    def unpin(self, address: int) -> None:
        assert self.waited
        del self.pinned[address]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the driver has pinned: bytes by address."""
    pinned: dict[int, int] = {}
    monkeypatch.setattr(Pins, "pinned", pinned, raising=False)
    monkeypatch.setattr(Pins, "most", 2, raising=False)
    monkeypatch.setattr(host_snapshots, "CUDADriver", Pins)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    return pinned


@pytest.mark.parametrize("closes", [True, False])
def test_what_is_pinned_is_given_back_by_a_load_that_fails_too(closes: bool, pinned: dict[int, int]) -> None:
    made = HostSnapshots([OnGPU()], 2, 3)  # type: ignore[list-item]
    made.begin(StateMoves(stored=((0, 2),)))
    assert list(pinned.values()) == [4096]
    if closes:
        made.close()
        made.close()
        assert not pinned
    del made
    gc.collect()
    assert not pinned


def test_memory_is_pinned_as_snapshots_need_it(
    pinned: dict[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two snapshots a piece. What the driver pins no more is used all the same, which is said once."""
    monkeypatch.setattr(host_snapshots, "_PIECE_BYTES", 1000)
    made = HostSnapshots([OnGPU()], 2, 8)  # type: ignore[list-item]
    assert made.size_bytes == 3200
    sizes = []
    with caplog.at_level(logging.WARNING):
        for host_snapshot in (1, 0, 5, 4, 2, 7, 3):
            made.begin(StateMoves(stored=((0, host_snapshot),)))
            made.begin(StateMoves(fetched=((0, host_snapshot),)))
            sizes.append(len(pinned))
    assert sizes == [1, 1, 2, 2, 2, 2, 2]
    assert [each.getMessage() for each in caplog.records] == [
        "snapshots of states beyond 8.2 kB are moved slowly: pinning memory of the host: out of memory"
    ]
    made.close()
    assert not pinned


def test_a_load_goes_on_without_the_defaults_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host can't have it, or the driver pins none; what was configured is refused."""

    def refuse(*_: object) -> HostSnapshots:
        raise KernelError("pinning memory of the host: not supported")

    monkeypatch.setattr(recurrent_memory, "HostSnapshots", refuse)
    with caplog.at_level(logging.WARNING):
        made = Case("cpu").memory
    assert (made.host, made.num_host_snapshots) == (None, 0)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.endswith("waits in the host's memory: pinning memory of the host: not supported")
    with pytest.raises(KernelError, match="not supported"):
        Case("cpu", 1 << 20)
