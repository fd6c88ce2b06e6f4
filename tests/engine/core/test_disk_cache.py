"""A prefix cache that outlives its engine: whatever becomes of its files, texts have the bits of a fresh one."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from engine.core.conversations import Chat
from engine.core.core_runs import run
from engine.core.test_hybrid_conversations import RECIPES, TightBackend, compare
from random_models import Recipe, random_model
from realizar.backends.base import ModelSource
from realizar.backends.cpu.runner import CPUBackend
from realizar.config import EngineConfig
from realizar.engine.core import disk_cache
from realizar.engine.core.disk_cache import Batch, Fetch
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.process.loop import EngineLoop
from realizar.engine.process.messages import Accepted, Add, Ask, Event, Reply
from realizar.engine.stats import EngineStats
from realizar.errors import CapacityError, ContextLengthError, QueueFullError
from realizar.kv_cache import block_files, block_keys
from realizar.kv_cache.block_files import BlockFiles
from realizar.outputs import RowError
from realizar.request import Client, Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from resolving import resolved
from waits import HANG_S

ATTENTION = Recipe(
    vocab_size=128, hidden_size=128, feed_forward_size=128, num_heads=2, num_kv_heads=1, context_length=4096,
    windows=(None, 70),
)  # fmt: skip


class FetchingCore(EngineCore):
    """Reads what files have of a prompt before it queues a request, as an engine's loop does, however slow that is."""

    def _block_s(self) -> float | None:
        return None

    def add(self, request: Request) -> None:
        fetch_now(self, request)
        super().add(request)


def fetch_now(core: EngineCore, request: Request) -> None:
    arrived: SimpleQueue[tuple[Fetch, Batch | None]] = SimpleQueue()
    if core.fetch(request, lambda *part: arrived.put(part)) is None:
        return
    while True:
        fetch, batch = arrived.get(timeout=60)
        core.take_in(fetch, batch)
        if batch is None:
            return


def make_core(
    recipe: Recipe, folder: Path | None, backend: CPUBackend | None = None, *, kind: type[EngineCore] = FetchingCore,
    drafts: bool = False, **options: Any,
) -> EngineCore:  # fmt: skip
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        threads=1, max_step_tokens=96, kv_cache_bytes=64 << 20, host_snapshot_bytes=8 << 20, context_length=640,
        **{"max_running": 5, "speculative_tokens": 2 if drafts else 0, **options},
    )  # fmt: skip
    settled, backend = resolved(spec, checkpoint, config), backend or CPUBackend()
    backend.load(spec, checkpoint, settled, {"drafter": ModelSource(spec, checkpoint)} if drafts else {})
    files = None if folder is None else BlockFiles(folder, "model", 1 << 30)
    return kind(backend, spec, settled, policy=Policy(stretch=math.inf, measures_drafts=False), files=files)


def save(core: EngineCore) -> None:
    """Let all be written that can be; what a step in flight computes once that has ended."""
    while core.save():
        if core._in_flight:
            core.step()
    assert core._disk is not None
    for future in list(core._disk._writing):
        future.result()
    core.save()


def ask(core: EngineCore, name: str, prompt: tuple[int, ...], **fields: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and those of the prompt that were found computed."""
    hits = core.scheduler.counts.prefix_cache_hits
    core.add(Request(name, prompt, SamplingParams(temperature=0.0), 8, **fields))
    outputs = run(core)[name]
    return [token for output in outputs for token in output.token_ids], core.scheduler.counts.prefix_cache_hits - hits


PROMPT = tuple(place * 37 % 90 for place in range(300))
KINDS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "attention": (ATTENTION, {}),
    "drafter": (ATTENTION, {"drafts": True}),
    "fp8": (ATTENTION, {"kv_cache_dtype": "fp8", "drafts": True}),
} | {name: (recipe, {}) for name, recipe in RECIPES.items()}


@pytest.mark.parametrize("name", KINDS)
def test_a_new_engine_starts_from_what_the_last_one_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix is found to the block, in several batches; a longer prompt goes on from it, another salt does not."""
    monkeypatch.setattr(disk_cache, "_BATCH_BYTES", 1)
    recipe, options = KINDS[name]
    first = make_core(recipe, tmp_path, **options)
    texts = [ask(first, "a", PROMPT, prompt_marks=(256,)), ask(first, "b", (*PROMPT[:256], 5, 6, 7))]
    assert texts[1][1] == 256
    save(first)
    assert first.disk_counts.saved > 8
    first.close()
    second = make_core(recipe, tmp_path, **options)
    found = [ask(second, "b", (*PROMPT[:256], 5, 6, 7)), ask(second, "a", PROMPT)]
    assert found == [(texts[1][0], 256), (texts[0][0], 288)]
    assert second.disk_counts.fetched > 8
    assert ask(second, "c", PROMPT, cache_salt="other") == (texts[0][0], 0)
    second.clear_cache()
    second.close()
    third = make_core(recipe, tmp_path, **options)
    assert ask(third, "a", PROMPT)[1] == 0
    third.close()


def damage(folder: Path, rng: random.Random) -> int:
    """Flip a bit in some files, and cut and remove others; the number of those that can't be read."""
    count = 0
    for path in sorted(folder.rglob("*.[0-9]")):
        kind = rng.choice(["flip", "cut", "remove", *["none"] * 27])
        data = bytearray(path.read_bytes())
        if kind == "remove":
            path.unlink()
        elif kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif kind == "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        count += kind in ("flip", "cut")
    return count


def kill_one(make: Callable[[], EngineCore], chat: Chat, folder: Path, num_files: int) -> None:
    """Let an engine in a process of its own go on with these conversations, and kill it once it wrote so many files."""

    def written() -> int:
        return len(list(folder.rglob("*.[0-9]")))

    before = written()
    child = os.fork()
    if not child:
        signal.alarm(int(HANG_S))
        try:
            chat.core = make()
            chat.run_until(chat.arrived + 40, all_ended=True)
            save(chat.core)
        finally:
            os._exit(0)
    while written() < before + num_files:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended without so many files"
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["attention", "delta-nets"])
def test_random_conversations_over_restarts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines end and are killed at any moment, files are damaged between them, and the disk is full now and then.

    An engine that is killed answers what the next one is asked, which finds some of its files.
    """
    caplog.set_level(logging.WARNING)
    recipe = KINDS[name][0]
    rng, is_full = random.Random(11), [False]
    monkeypatch.setattr(disk_cache, "_BUSY_S", 0.0)
    monkeypatch.setattr(disk_cache, "_BATCH_BYTES", 20_000)
    monkeypatch.setattr(block_files, "_PAUSE_S", 0.0)

    def renamed(path: Path, target: Path) -> None:
        if is_full[0] and rng.random() < 0.2:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.rename(target)

    monkeypatch.setattr(Path, "replace", renamed)

    def make() -> EngineCore:
        return make_core(recipe, tmp_path, TightBackend(0) if name in RECIPES else None)

    chat: Chat | None = None
    fetched = damaged = 0
    for incarnation in range(10):
        if chat and incarnation % 2 == 0:
            kill_one(make, chat, tmp_path, rng.randrange(1, 20))
        core = make()
        chat = chat or Chat(5, core, scale=4)
        chat.core = core
        is_full[0] = incarnation in (2, 5)
        chat.run_until(20 * (incarnation + 1), all_ended=incarnation == 9)
        if incarnation % 2:
            save(core)
        fetched += core.disk_counts.fetched
        core.close()
        damaged += damage(tmp_path, rng)
    assert chat is not None
    assert fetched > 40
    assert len(chat.ended) + chat.lost == 200
    messages = [record.getMessage() for record in caplog.records]
    assert 0 < sum("is damaged" in message for message in messages) <= damaged
    assert all("is damaged" in message or "takes no blocks" in message for message in messages)
    fresh = make_core(recipe, None, max_running=1, prefix_cache=False)
    try:
        compare(chat, fresh)
    finally:
        fresh.close()


def leave_prompt(folder: Path) -> None:
    """Files of the blocks of `PROMPT`, by an engine that has ended."""
    core = make_core(ATTENTION, folder)
    ask(core, "a", PROMPT)
    save(core)
    core.close()


def test_what_is_slower_than_computing_is_not_read(tmp_path: Path) -> None:
    leave_prompt(tmp_path)
    second = make_core(ATTENTION, tmp_path, kind=EngineCore)
    assert second._disk is not None
    ask(second, "b", tuple(reversed(PROMPT)))  # by which the speed of computing is known
    second._disk._read_s = 1.0  # a byte a second
    assert ask_fetching(second, "a", PROMPT) == 0
    second.close()


def test_what_is_cleared_while_it_is_read_is_not_taken_in(tmp_path: Path) -> None:
    leave_prompt(tmp_path)
    second = make_core(ATTENTION, tmp_path, kind=EngineCore)
    arrived: SimpleQueue[tuple[Fetch, Batch | None]] = SimpleQueue()
    request = Request("a", PROMPT, SamplingParams(temperature=0.0), 8)
    assert second.fetch(request, lambda *part: arrived.put(part)) is not None
    parts = [arrived.get(timeout=30)]
    second.clear_cache()
    while parts[-1][1] is not None:
        second.take_in(*parts[-1])
        parts.append(arrived.get(timeout=30))
    second.take_in(*parts[-1])
    assert ask(second, "a", PROMPT)[1] == 0
    assert second.disk_counts.fetched == 0
    second.close()


def test_a_prefix_does_not_wait_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is read in several batches, of which the engine takes none in meanwhile."""
    monkeypatch.setattr(disk_cache, "_BATCH_BYTES", 1)
    leave_prompt(tmp_path)
    core = make_core(ATTENTION, tmp_path, kind=EngineCore)
    goes_on = threading.Event()
    assert core.fetch(Request("a", PROMPT, SamplingParams(temperature=0.0), 8), lambda *_: goes_on.wait(60))
    assert ask_fetching(core, "b", PROMPT[:40]) == 32
    goes_on.set()
    core.close()


def ask_fetching(core: EngineCore, name: str, prompt: tuple[int, ...]) -> int:
    """The tokens that a prompt starts from once its files were read."""
    fetch_now(core, Request(name, prompt, SamplingParams(temperature=0.0), 8))
    return ask(core, name, prompt)[1]


def test_a_prompt_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its files are read first."""
    leave_prompt(tmp_path)
    second = make_core(ATTENTION, tmp_path)
    made = list[int]()

    class Counted:
        @staticmethod
        def sha256(data: bytes) -> Any:
            made.append(len(data))
            return hashlib.sha256(data)

    monkeypatch.setattr(block_keys, "hashlib", Counted)
    for hits in (288, 288):  # of files, and of the cache
        made.clear()
        assert ask(second, "a", PROMPT)[1] == hits
        assert len(made) == 1 + len(PROMPT) // 32  # the salt's, and those of blocks
    second.close()


def test_requests_that_files_are_read_for_count_in_the_queue(tmp_path: Path) -> None:
    """Others are refused meanwhile where there is no room, and nothing is read for what could not be queued."""
    leave_prompt(tmp_path)
    core = make_core(ATTENTION, tmp_path, kind=EngineCore, max_running=1, max_queued=1)
    arrived: SimpleQueue[tuple[Fetch, Batch | None]] = SimpleQueue()

    def fetches(name: str, prompt: tuple[int, ...] = PROMPT) -> bool:
        request = Request(name, prompt, SamplingParams(temperature=0.0), 8)
        return core.fetch(request, lambda *part: arrived.put(part)) is not None

    with pytest.raises(ContextLengthError):
        fetches("too long", PROMPT * 3)
    assert fetches("a")
    assert fetches("b")
    with pytest.raises(QueueFullError):
        fetches("c")
    with pytest.raises(QueueFullError):
        core.add(Request("d", (1, 2), SamplingParams(temperature=0.0), 8))
    core.close()


def test_a_request_counts_as_waiting_while_its_files_are_read(tmp_path: Path) -> None:
    leave_prompt(tmp_path)
    core, events = make_core(ATTENTION, tmp_path, kind=EngineCore), list[Event]()
    loop = EngineLoop(events.append)

    def num_waiting() -> int:
        loop.handle(core, Ask(0, "stats"))
        reply = events.pop()
        assert isinstance(reply, Reply)
        assert isinstance(reply.value, EngineStats)
        return reply.value.num_waiting

    loop.handle(core, Add(Request("a", PROMPT, SamplingParams(temperature=0.0), 8)))
    assert (events, num_waiting()) == ([], 1)
    while not events:
        with loop._news:
            assert loop._news.wait_for(lambda: loop._inbox, 60)
        loop.handle(core, loop._inbox.popleft())
    assert (events, num_waiting()) == ([Accepted("a")], 1)
    run(core)
    assert core.scheduler.counts.prefix_cache_hits == 288
    core.close()


def test_snapshots_from_files_are_those_of_the_client_who_has_them_read(tmp_path: Path) -> None:
    recipe = KINDS["delta-nets"][0]
    first = make_core(recipe, tmp_path)
    ask(first, "a", PROMPT, prompt_marks=(256,))
    save(first)
    first.close()
    second = make_core(recipe, tmp_path)
    ask(second, "a", PROMPT, client=Client("one"))
    assert second.disk_counts.fetched
    assert set(second.cache.snapshots._clients.values()) == {"one"}
    second.close()


def test_a_step_that_failed_leaves_nothing_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was registered before the step is not written either: steps behind it may have gone on from it."""
    monkeypatch.setattr(disk_cache, "_BUSY_S", math.inf)
    core = make_core(ATTENTION, tmp_path)
    core.add(Request("a", PROMPT, SamplingParams(temperature=0.0), 8))
    core.step()
    core.scheduler.lose([], RowError("a kernel failed"))
    save(core)
    assert not list(tmp_path.rglob("*.0"))
    core.close()


def test_too_little_memory_for_copies_costs_reuse_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> Any:
        raise CapacityError("the GPU is out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(CPUBackend, "read_cached", refused)
        leave_prompt(tmp_path)
    assert not list(tmp_path.rglob("*.0"))
    leave_prompt(tmp_path)
    core = make_core(ATTENTION, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(CPUBackend, "write_cached", refused)
        text, hits = ask(core, "a", PROMPT)
    assert hits == 0
    assert ask(core, "b", PROMPT) == (text, 288)
    core.audit()
    core.close()
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_an_engine_ends_while_prefixes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes in what was read, and another request waits for a buffer."""
    monkeypatch.setattr(disk_cache, "_BATCH_BYTES", 1)
    leave_prompt(tmp_path)
    core = make_core(ATTENTION, tmp_path, kind=EngineCore)
    arrived: SimpleQueue[tuple[Fetch, Batch | None]] = SimpleQueue()
    for name in ("a", "b", "c"):
        request = Request(name, PROMPT, SamplingParams(temperature=0.0), 8)
        assert core.fetch(request, lambda *part: arrived.put(part)) is not None
    parts = [arrived.get(timeout=30) for _ in range(3)]
    assert all(batch is not None for _, batch in parts)
    core.close()
    for part in parts:  # on their way as it ended
        core.take_in(*part)
