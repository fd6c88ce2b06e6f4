"""Times how a sleeping model's memory comes back to a GPU right after another model's was freed: mapping, touch, copy.

python scripts/gpu_memory/time_wakes.py [--rounds 3] [--only CASE ...] [--ours]

Two processes hold memory in segments as torch asks for it at the load of an 8B and of a 1B at Q4_K_M, with a KV cache
of 4 GB each, and no model. In each round the large one sleeps, and the small one wakes some time later. A line a wake:
milliseconds in all, those that each call of the driver took on the host, and the share of the bus's speed, which is
that of one large pinned copy. Cases differ in how the large one gives its memory back and how the small one takes it;
with `--ours` both do as the backend does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from realizar.backends.cuda.native.launcher import checked
from realizar.backends.cuda.sleep.driver import CUDADriver
from realizar.backends.cuda.sleep.host_memory import HostMemory
from realizar.backends.cuda.sleep.load_memory import Segments

_MIB = 1 << 20
_KV_MIB = 3814
_SMALL_MIB = [*[20] * 5, *[20, 12] * 16, 216, *[20] * 4, 32, 64, 64, 128, 256, 256]
_LARGE_MIB = [*[20] * 30, *[66, 38] * 32, 430, 432, *[20] * 4, 32, 64, 128, 256, 512, 512]
_SHOWN = ("create", "map", "access", "zero", "copy", "wait")


@dataclass(frozen=True, slots=True)
class Case:
    """One way. Attributes:
    frees: when the large one frees memory: "late" after its copies, "early" behind each of them, or "never".
    pause_ms: until the small one wakes. range_mib: of memory that is taken at once; 0 is a segment.
    takes: "ahead" of each copy, "apart" (all mapped, then all touched, then copied), "thread" or "mapped" before.
    """

    frees: str
    pause_ms: int
    range_mib: int
    takes: str


CASES = {
    "quiet": Case("never", 0, 0, "ahead"),
    "at-once": Case("late", 0, 0, "ahead"),
    "after-10": Case("late", 10, 0, "ahead"),
    "after-50": Case("late", 50, 0, "ahead"),
    "apart": Case("late", 0, 0, "apart"),
    "apart-after-100": Case("late", 100, 0, "apart"),
    "copy-alone": Case("late", 0, 0, "mapped"),
    "parts-128": Case("late", 0, 128, "ahead"),
    "parts-1024": Case("late", 0, 1024, "ahead"),
    "thread": Case("late", 0, 0, "thread"),
    "early": Case("early", 0, 0, "ahead"),
    "early-parts-128": Case("early", 0, 128, "ahead"),
}


class Range(NamedTuple):
    """Memory that is mapped at once. Attributes: offset: in bytes. keeps: its contents are copied."""

    offset: int
    size: int
    keeps: bool


class TimedDriver(CUDADriver):
    """Counts the seconds that the host spends in each call."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started_s

    def map(self, address: int, size_bytes: int) -> object:
        driver = self._driver
        with self.timed("create"):
            handle: Any = checked(driver.cuMemCreate(size_bytes, self._properties, 0), "allocating")
        with self.timed("map"):
            checked(driver.cuMemMap(address, size_bytes, 0, handle, 0), "mapping")
        with self.timed("access"):
            checked(driver.cuMemSetAccess(address, size_bytes, [self._access], 1), "opening")
        return handle


class Model:
    """Memory of a model. Args: sizes_mib: of the segments that are kept."""

    def __init__(self, driver: TimedDriver, sizes_mib: list[int]) -> None:
        self.driver = driver
        sizes = [size * _MIB for size in sizes_mib]
        self.kept = sum(sizes)
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.segments = [*(Range(at, size, True) for at, size in zip(starts, sizes, strict=True))]
        self.segments.append(Range(self.kept, _KV_MIB * _MIB, False))
        self.base = driver.reserve(self.kept + _KV_MIB * _MIB)
        self.handles: dict[Range, object] = {}
        self.host = HostMemory(driver, self.kept)
        self.copies(to_host=None)  # pinned
        self.take(0, "ahead", contents=False)

    def ranges(self, range_mib: int) -> list[Range]:
        """Segments, joined up to a size."""
        if not range_mib:
            return self.segments
        found: list[Range] = []
        for each in self.segments:
            last = found[-1] if found else None
            if last and last.keeps == each.keeps and last.size + each.size <= range_mib * _MIB:
                found[-1] = last._replace(size=last.size + each.size)
            else:
                found.append(each)
        return found

    def copies(self, *, to_host: bool | None, part: Range | None = None) -> None:
        offset, size = (part.offset, part.size) if part else (0, self.kept)
        for chunk in self.host.parts(offset, size):
            address = self.base + offset + chunk.start
            if to_host:
                self.driver.copy_to_host(chunk.address, address, chunk.size_bytes)
            elif to_host is not None:
                self.driver.copy_to_device(address, chunk.address, chunk.size_bytes)

    def free(self, part: Range) -> None:
        self.driver.unmap(self.base + part.offset, part.size, self.handles.pop(part))

    def sleep(self, frees: str) -> None:
        driver, ranges = self.driver, list(self.handles)
        driver.synchronize()
        begun: list[tuple[Range, Any]] = []
        if frees == "early":
            for each in ranges:
                if not each.keeps:
                    self.free(each)
        for each in ranges:
            if each.keeps:
                self.copies(to_host=True, part=each)
            if each.keeps and frees == "early":
                begun.append((each, driver.mark()))
                if len(begun) > 4:
                    done, event = begun.pop(0)
                    driver.wait(event)
                    self.free(done)
        driver.synchronize()
        for _, event in begun:
            driver.wait(event)
        if frees != "never":
            for each in list(self.handles):
                self.free(each)

    def take(self, range_mib: int, takes: str, *, contents: bool = True) -> dict[str, float]:
        """Map, and copy; seconds by call, and of all."""
        driver, ranges = self.driver, self.ranges(range_mib)
        driver.seconds.clear()
        started_s = time.perf_counter()
        if takes in ("apart", "thread"):
            with ThreadPoolExecutor(1) as thread:
                mapped = [thread.submit(self._map, each) for each in ranges]
                if takes == "thread":
                    for each, done in zip(ranges, mapped, strict=True):
                        done.result()
                        self._fill(each, contents=contents)
        elif takes == "ahead":
            for each in ranges:
                self._map(each)
                self._fill(each, contents=contents)
        if takes == "apart":
            with driver.timed("zero"):  # the first touch of all
                driver.zero(self.base, self.kept + _KV_MIB * _MIB)
                driver.synchronize()
        if takes in ("apart", "mapped"):
            with driver.timed("copy"):
                self.copies(to_host=False)
        with driver.timed("wait"):
            driver.synchronize()
        driver.seconds["all"] = time.perf_counter() - started_s
        return dict(driver.seconds)

    def _map(self, part: Range) -> None:
        self.handles[part] = self.driver.map(self.base + part.offset, part.size)

    def _fill(self, part: Range, *, contents: bool) -> None:
        if not part.keeps or not contents:
            with self.driver.timed("zero"):
                self.driver.zero(self.base + part.offset, part.size)
            return
        with self.driver.timed("copy"):
            self.copies(to_host=False, part=part)


class Ours:
    """Memory of a model as the backend holds it. Answers as `Model`, whatever the case."""

    def __init__(self, driver: TimedDriver, sizes_mib: list[int]) -> None:
        self._driver, self._segments = driver, Segments(driver)
        self.kept = sum(sizes_mib) * _MIB
        for size in sizes_mib:
            self._segments.allocate(size * _MIB, keeps=True)
        self._segments.allocate(_KV_MIB * _MIB, keeps=False)
        self._segments.sleep()  # pins
        self._segments.wake()

    def sleep(self, _frees: str) -> None:
        self._segments.sleep()

    def take(self, _range_mib: int, _takes: str) -> dict[str, float]:
        self._driver.seconds.clear()
        started_s = time.perf_counter()
        self._segments.wake()
        return {**self._driver.seconds, "all": time.perf_counter() - started_s}


def bus_bytes_s(driver: Any) -> float:
    """Bytes a second of one large pinned copy to the GPU, the best of four."""
    size = 2048 * _MIB
    host = checked(driver.cuMemAllocHost(size), "pinning")
    device = checked(driver.cuMemAlloc(size), "allocating")
    seconds = []
    for _ in range(4):
        checked(driver.cuCtxSynchronize(), "waiting")
        started_s = time.perf_counter()
        checked(driver.cuMemcpyHtoDAsync(device, host, size, 0), "copying")
        checked(driver.cuCtxSynchronize(), "waiting")
        seconds.append(time.perf_counter() - started_s)
    driver.cuMemFree(device)
    driver.cuMemFreeHost(host)
    return size / min(seconds)


def process(connection: Connection, sizes_mib: list[int], *, ours: bool) -> None:
    """A model's process: does what is asked, and answers with what it measured."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    driver = TimedDriver(device)
    if sizes_mib is _SMALL_MIB:
        connection.send(bus_bytes_s(driver._driver))
    model = Ours(driver, sizes_mib) if ours else Model(driver, sizes_mib)
    connection.send(model.kept)
    while (question := connection.recv()) is not None:
        started_s = time.perf_counter()
        if question[0] == "sleep":
            model.sleep(question[1])
            connection.send({"all": time.perf_counter() - started_s})
        else:
            connection.send(model.take(*question[1:]))


class Child:
    """A process, and what it is asked."""

    def __init__(self, sizes_mib: list[int], *, ours: bool) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        started = multiprocessing.get_context("fork").Process(
            target=process, args=(theirs, sizes_mib), kwargs={"ours": ours}, daemon=True
        )
        started.start()

    def read(self) -> Any:
        return self._connection.recv()

    def ask(self, *what: object) -> dict[str, float]:
        self._connection.send(what)
        answer: dict[str, float] = self._connection.recv()
        return answer


def measure(case: Case, large: Child, small: Child) -> tuple[float, dict[str, float]]:
    """Seconds that the large one slept in, and those of the small one's wake."""
    small.ask("sleep", "never" if case.takes == "mapped" else "late")
    slept_s = large.ask("sleep", case.frees)["all"]
    time.sleep(case.pause_ms / 1000)
    found = small.ask("take", case.range_mib, case.takes)
    large.ask("take", 0, "mapped" if case.frees == "never" else "ahead")
    return slept_s, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--ours", action="store_true")
    arguments = parser.parse_args()
    small = Child(_SMALL_MIB, ours=arguments.ours)
    large = Child(_LARGE_MIB, ours=arguments.ours)
    bus, kept, kept_large = small.read(), small.read(), large.read()
    print(f"the bus: {bus / 1e9:.1f} GB/s; small {kept / 1e9:.2f} GB, large {kept_large / 1e9:.2f} GB", flush=True)
    shares: dict[str, list[float]] = {}
    for turn in range(arguments.rounds):
        for name in ("at-once",) if arguments.ours else arguments.only:
            slept_s, found = measure(CASES[name], large, small)
            shares.setdefault(name, []).append(kept / found["all"] / bus)
            calls = " ".join(f"{each} {1e3 * found.get(each, 0):.1f}" for each in _SHOWN)
            print(
                f"{turn} {name:<18} slept {1e3 * slept_s:6.1f} ms, awake {1e3 * found['all']:6.1f} ms"
                f" ({shares[name][-1]:.0%}): {calls}",
                flush=True,
            )
    for name, found_shares in shares.items():
        print(f"{name:<18} median {statistics.median(found_shares):.0%} of the bus")
    return 0


if __name__ == "__main__":
    sys.exit(main())
