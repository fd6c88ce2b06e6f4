"""Pulls in processes of their own, from a hub on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hub.fake_hub import Endpoint, fake_hub
from realizar.errors import HubError, UnknownModelError
from realizar.hub.cache import models_dir
from realizar.hub.progress import RemoteFile, check_room
from realizar.hub.pull_process import RESERVE_BYTES
from realizar.server.models.pulls import PullEvent, fetch_in_process
from waits import HANG_S

WEIGHTS = b"GGUF weights" * 100_000
SEES = {"m-Q8_0.gguf": b"GGUF", "mmproj-F16.gguf": b"GGUF tower"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    with fake_hub({"user/m": {"m-Q8_0.gguf": WEIGHTS}, "user/sees": SEES}) as endpoint:
        for name, value in endpoint.variables(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield endpoint


def test_progress_has_digests_and_sizes(hub: Endpoint) -> None:
    events: list[PullEvent] = []
    path = asyncio.run(fetch_in_process("user/m:Q8_0", events.append))
    assert path.read_bytes() == WEIGHTS
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert events[-1] == PullEvent(f"pulling {digest[:12]}", f"sha256:{digest}", len(WEIGHTS), len(WEIGHTS))
    assert [event.completed or 0 for event in events] == sorted(event.completed or 0 for event in events)
    assert (models_dir() / "user--m--Q8_0" / "pulled.json").is_file()


def test_an_encoder_of_images_comes_where_the_server_has_it_loaded(hub: Endpoint) -> None:
    for mmproj, files in (("none", ["m-Q8_0.gguf"]), ("auto", [*SEES])):
        path = asyncio.run(fetch_in_process("user/sees:Q8_0", lambda event: None, mmproj))
        assert sorted(each.name for each in path.parent.iterdir()) == files


@pytest.mark.parametrize(
    ("name", "size", "kind", "message"),
    [
        ("user/m:Q8_0", 1 << 62, HubError, "4.61 EB of disk|disk, and"),
        ("user/gone", 1, UnknownModelError, "does not exist on the endpoint"),
        ("user/m:Q4_0", 1, UnknownModelError, "it has: Q8_0"),
        ("user/m--m", 1, UnknownModelError, "Cannot have --"),
        ("/etc/passwd", 1, UnknownModelError, "neither a file"),
    ],
)
def test_what_is_not_fetched_says_why(hub: Endpoint, name: str, size: int, kind: type[HubError], message: str) -> None:
    hub.sizes["m-Q8_0.gguf"] = size
    with pytest.raises(HubError, match=message) as raised:
        asyncio.run(fetch_in_process(name, lambda event: None))
    assert type(raised.value) is kind
    assert not any("resolve" in request for request in hub.requests)


def test_an_offline_pull_stays_within_the_cache(hub: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "private-Q8_0.gguf").write_bytes(WEIGHTS)
    with pytest.raises(UnknownModelError, match="neither a file"):
        asyncio.run(fetch_in_process(f"user/m@{tmp_path}/own", lambda event: None))


def test_a_hub_can_name_no_file_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub({"user/m": {"../../../../outside-Q8_0.gguf": WEIGHTS}}) as endpoint:
        for name, value in endpoint.variables(tmp_path).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(HubError, match="neither GGUF nor safetensors"):
            asyncio.run(fetch_in_process("user/m", lambda event: None))
    assert not list(tmp_path.rglob("outside*"))


def test_a_reserve_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=RESERVE_BYTES + 100))
    folder = tmp_path / "not" / "there"
    check_room(folder, [RemoteFile("a", 60, 60, None), RemoteFile("b", 40, 40, None)], RESERVE_BYTES)
    check_room(folder, [RemoteFile("a", 1 << 60, 0, None)], RESERVE_BYTES)  # it is here already
    with pytest.raises(HubError, match="101 B of disk"):
        check_room(folder, [RemoteFile("a", 60, 60, None), RemoteFile("b", 41, 41, None)], RESERVE_BYTES)


def children() -> set[str]:
    """Processes that this thread started; earlier tests of the same worker may have left a helper of Python's own."""
    return set(Path("/proc/thread-self/children").read_text(encoding="ascii").split())


def test_one_that_is_given_up_leaves_no_process(hub: Endpoint) -> None:
    hub.held.add("m-Q8_0.gguf")
    before = children()

    async def main() -> None:
        fetching = asyncio.create_task(fetch_in_process("user/m:Q8_0", lambda event: None))
        assert await asyncio.to_thread(hub.half_sent.wait, HANG_S)
        assert len(children() - before) == 1
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert children() - before == set()

    asyncio.run(main())
    hub.held.clear()
    path = asyncio.run(fetch_in_process("user/m:Q8_0", lambda event: None))
    assert path.read_bytes() == WEIGHTS


def test_a_process_that_is_ended_on_its_way_out_says_nothing() -> None:
    code = (
        "import atexit, os, signal\n"
        "from realizar.hub.pull_process import main\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "main('/etc/passwd', 'auto')"
    )
    ended = subprocess.run((sys.executable, "-c", code), capture_output=True, check=False, timeout=HANG_S)
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, b"")
    assert "neither a file" in json.loads(ended.stdout)["unknown"]
