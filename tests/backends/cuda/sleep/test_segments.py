"""Memory that leaves a GPU and comes back: contents, addresses, bounds, and faults on either way."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.sleep.fake_driver import PAGE, FakeDriver, device_bytes, host_bytes
from realizar.backends.cuda.sleep.load_memory import Segments
from realizar.errors import CapacityError, DeviceLostError, KernelError

CHUNK = 4 * PAGE


def filled(driver: FakeDriver, segments: Segments, sizes: list[int]) -> dict[int, NDArray[np.uint8]]:
    """Segments that are kept, with random contents, by address."""
    rng = np.random.default_rng(len(sizes))
    contents = {}
    for size in sizes:
        address = segments.allocate(size, keeps=True)
        contents[address] = rng.integers(0, 256, size, np.uint8)
        driver.write(address, contents[address])
    return contents


def check(driver: FakeDriver, contents: dict[int, NDArray[np.uint8]]) -> None:
    for address, data in contents.items():
        assert np.array_equal(driver.read(address, data.size), data)


def test_contents_are_the_same_at_the_same_addresses_and_the_cache_is_empty() -> None:
    driver = FakeDriver()
    segments = Segments(driver, CHUNK)
    contents = filled(driver, segments, [PAGE, 3 * PAGE, 9 * PAGE + 5, 1])  # across chunks, and with odd ends
    cache = segments.allocate(2 * PAGE, keeps=False)
    more = filled(driver, segments, [7 * PAGE])
    driver.write(cache, np.ones(2 * PAGE, np.uint8))
    kept = PAGE * (1 + 3 + 10 + 1 + 7)
    for turn in range(3):
        assert device_bytes(segments) == kept + 2 * PAGE
        assert segments.sleep() == kept
        assert (device_bytes(segments), driver.memory) == (0, {})
        assert host_bytes(segments) == kept
        assert segments.wake() == kept
        check(driver, contents | more)
        assert not driver.read(cache, 2 * PAGE).any()
        driver.write(cache, np.ones(2 * PAGE, np.uint8))
        address = next(iter(more))
        more[address] = np.full(7 * PAGE, turn, np.uint8)  # changed while awake
        driver.write(address, more[address])
    assert driver.log == ["pin"] * -(-kept // CHUNK)  # once, and never again
    for address in [*contents, cache, *more]:
        segments.free(address)
    segments.close()
    assert (driver.memory, driver.reserved, driver.pinned) == ({}, {}, {})


def test_what_nothing_uses_is_freed_at_once_and_never_comes_back() -> None:
    driver = FakeDriver()
    segments = Segments(driver, CHUNK)
    contents = filled(driver, segments, [PAGE, 2 * PAGE])
    unused = segments.allocate(50 * PAGE, keeps=True)
    segments.discard([unused, 12345])  # also addresses of others, which are none of ours
    assert device_bytes(segments) == 3 * PAGE
    assert segments.sleep() == 3 * PAGE
    segments.wake()
    check(driver, contents)
    assert unused not in driver.memory
    segments.free(unused)  # torch gives it back in the end
    assert unused not in driver.reserved


def test_a_host_without_room_leaves_the_model_awake() -> None:
    driver = FakeDriver()
    segments = Segments(driver, CHUNK)
    contents = filled(driver, segments, [10 * PAGE])
    driver.fails.add("pin")
    with pytest.raises(KernelError, match="pin"):
        segments.sleep()
    check(driver, contents)
    assert (driver.pinned, host_bytes(segments)) == ({}, 0)
    huge = Segments(driver, CHUNK)
    size = 1 << 62
    driver.limit_bytes = 1 << 63
    driver.map = lambda address, size_bytes: address  # type: ignore[method-assign]
    huge.allocate(size, keeps=True)
    with pytest.raises(CapacityError, match="the host has no"):
        huge.sleep()
    assert segments.sleep() == 10 * PAGE


def test_memory_is_freed_behind_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed at the end would be cleared while another model is copied."""
    driver = FakeDriver()
    segments = Segments(driver, CHUNK)
    filled(driver, segments, [3 * PAGE] * 20)
    segments.allocate(50 * PAGE, keeps=False)
    held, real = list[int](), driver.copy_to_host

    def copy(host_address: int, address: int, size_bytes: int) -> None:
        held.append(device_bytes(segments) // PAGE)
        real(host_address, address, size_bytes)

    monkeypatch.setattr(driver, "copy_to_host", copy)
    segments.sleep()
    assert held[0] == 60  # the cache has gone already
    assert held == sorted(held, reverse=True)
    assert held[-1] <= 5 * 3


class PinFailsLate(FakeDriver):
    """Pins two chunks, then no more."""

    def pin(self, host_address: int, size_bytes: int) -> None:
        if len(self.pinned) == 2:
            raise KernelError("pin: CUDA_ERROR_OUT_OF_MEMORY")
        super().pin(host_address, size_bytes)


def test_a_host_that_pins_no_more_halfway_leaves_the_model_awake() -> None:
    driver = PinFailsLate()
    segments = Segments(driver, CHUNK)
    contents = filled(driver, segments, [PAGE] * 12)
    cache = segments.allocate(2 * PAGE, keeps=False)
    for _ in range(2):
        with pytest.raises(KernelError, match="pin"):
            segments.sleep()
        check(driver, contents)
        assert not driver.read(cache, 2 * PAGE).any()
        assert (device_bytes(segments), driver.pinned, host_bytes(segments)) == (14 * PAGE, {}, 0)


def test_a_model_that_can_neither_sleep_nor_stay_awake_is_lost() -> None:
    driver = PinFailsLate()
    segments = Segments(driver, CHUNK)
    addresses = list(filled(driver, segments, [PAGE] * 12))
    driver.fails.add("map")
    with pytest.raises(DeviceLostError, match=r"weights are lost: pin: .*, and then map"):
        segments.sleep()
    for address in addresses:
        segments.free(address)
    segments.close()
    assert (driver.memory, driver.reserved, driver.pinned) == ({}, {}, {})


def test_a_gpu_without_room_leaves_the_model_asleep_and_takes_nothing() -> None:
    driver = FakeDriver(limit_bytes=12 * PAGE)
    segments = Segments(driver, CHUNK)
    contents = filled(driver, segments, [4 * PAGE, 4 * PAGE, 4 * PAGE])
    segments.sleep()
    other = Segments(driver, CHUNK)
    address = other.allocate(5 * PAGE, keeps=True)
    with pytest.raises(KernelError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        segments.wake()
    assert device_bytes(segments) == 0
    other.free(address)
    segments.wake()
    check(driver, contents)


def test_an_allocation_that_fails_leaves_no_addresses() -> None:
    driver = FakeDriver(limit_bytes=PAGE)
    segments = Segments(driver, CHUNK)
    with pytest.raises(KernelError):
        segments.allocate(2 * PAGE, keeps=True)
    assert driver.reserved == {}


def test_calls_in_the_wrong_order_are_faults() -> None:
    segments = Segments(FakeDriver(), CHUNK)
    with pytest.raises(RuntimeError, match="not asleep"):
        segments.wake()
    assert segments.sleep() == 0
    with pytest.raises(RuntimeError, match="asleep already"):
        segments.sleep()
    assert segments.wake() == 0
