"""`realizar ps`: it lists servers that run, and none that have ended, however they ended."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import httpx
import pytest

from engine.process.served import Served, serving
from realizar.cli.commands.ps import _duration, tree_bytes
from realizar.cli.server_records import Announcement, ServerRecord, pid_namespace, running_servers, servers_folder
from waits import HANG_S

RECORD = ServerRecord(os.getpid(), pid_namespace(), "http://127.0.0.1:1", ["one", "two"], 1000.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "realizar" / "servers"


def listed(realizar: Callable[..., Any]) -> list[dict[str, Any]]:
    servers: list[dict[str, Any]] = json.loads(realizar("ps", "--json").stdout)["servers"]
    return servers


def test_a_server_is_listed_while_it_runs(folder: Path, tiny_path: Path, realizar: Callable[..., Any]) -> None:
    with serving(tiny_path, "--served-model-name", "mine") as served:
        url = served.wait_ready()
        (server,) = listed(realizar)
        assert (server["pid"], server["models"], server["state"]) == (served.process.pid, ["mine"], "ready")
        assert (server["url"], server["device"], server["device_bytes"]) == (url, "cpu", 0)
        assert server["memory_bytes"] > 1_000_000
        assert server["running_s"] >= 0
        (titles, row) = realizar("ps").stdout.splitlines()
        assert titles.split() == ["pid", "model", "address", "state", "device", "memory", "running"]
        assert row.split()[:4] == [str(served.process.pid), "mine", url, "ready"]
        served.process.terminate()
        assert served.wait_exit() == 0
        assert list(folder.iterdir()) == []
    assert listed(realizar) == []
    assert realizar("ps").stderr == "no server of yours is running\n"


def test_several_models_are_listed_with_their_states_and_devices(
    folder: Path, tiny_path: Path, tmp_path: Path, realizar: Callable[..., Any]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("one", "two"):
        copyfile(tiny_path, models / f"{name}.gguf")
    options = ("--context-length", "512", "--kv-cache-bytes", "4M", "--max-running", "4")
    with serving("--model-folder", models, *options) as served:
        url = served.wait_ready()
        (server,) = listed(realizar)
        assert (server["models"], server["model_states"], server["device"]) == (["one", "two"], ["known", "known"], "")
        body = {"model": "one", "prompt": "Hi", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S).status_code == 200
        (server,) = listed(realizar)
        assert (server["model_states"], server["device"]) == (["ready", "known"], "cpu")
        assert (server["state"], server["device_bytes"]) == ("ready", 0)
        assert "one (ready), two (not loaded)" in realizar("ps").stdout
        (loaded,) = httpx.get(f"{url}/api/ps", timeout=HANG_S).json()["models"]
        assert (loaded["name"].partition(":")[0], loaded["state"], loaded["device"]) == ("one", "ready", "cpu")
        shown = httpx.get(f"{url}/v1/models", timeout=HANG_S).json()["data"]
        assert [each.get("device") for each in shown] == ["cpu", None]


def test_a_killed_server_is_not_listed(folder: Path, tiny_path: Path, realizar: Callable[..., Any]) -> None:
    served = Served(tiny_path)
    try:
        served.wait_ready()
        assert len(listed(realizar)) == 1
        served.process.send_signal(signal.SIGKILL)
        served.process.wait(HANG_S)
        assert len(list(folder.iterdir())) == 1, "nothing was left to clean"
        assert listed(realizar) == []
        assert list(folder.iterdir()) == []
    finally:
        served.close()


def test_a_record_changes_without_a_gap(folder: Path) -> None:
    announcement = Announcement(folder, RECORD)
    try:
        assert running_servers(folder) == [RECORD]
        announcement.update(state="ready", device="cuda:0", device_bytes=7)
        (found,) = running_servers(folder)
        assert (found.state, found.device, found.device_bytes, found.models) == ("ready", "cuda:0", 7, ["one", "two"])
        assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        announcement.close()
        announcement.close()
    assert running_servers(folder) == []


def test_rows_are_readable_and_hostile_names_harmless(folder: Path, realizar: Callable[..., Any]) -> None:
    first = Announcement(folder, RECORD)
    other = ServerRecord(1, "pid:[elsewhere]", "http://h:2", ["\x1b[2J"], 2000.0, "ready", "cuda:0 H200", 3_000_000_000)
    other = replace(other, replica_states=["ready", "starting", "ready"])
    second = Announcement(folder, other)
    try:
        lines = realizar("ps").stdout.splitlines()
    finally:
        first.close()
        second.close()
    assert "one, two" in lines[1]
    assert "loading" in lines[1]
    assert "\\x1b[2J" in lines[2]
    assert "ready (replicas: 2 ready, 1 starting)" in lines[2]
    assert "cuda:0 H200, 3.00 GB there  unknown" in lines[2], "a pid of another container is another process here"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff", b"[" * 9000])
def test_malformed_files_are_passed_over(folder: Path, content: bytes) -> None:
    announcement = Announcement(folder, RECORD)
    try:
        (path,) = folder.iterdir()
        path.write_bytes(content)  # the lock is held
        (folder / "dead.json").write_bytes(content)
        (folder / "link.json").symlink_to("/dev/zero")
        os.mkfifo(folder / "pipe.json")
        assert running_servers(folder) == []
        assert path.exists()
        assert not (folder / "dead.json").exists()
    finally:
        announcement.close()


@pytest.mark.parametrize("field", ["pid", "url", "models", "started_s", "device_bytes"])
def test_a_record_with_a_wrong_type_is_none(field: str) -> None:
    values = {name: getattr(RECORD, name) for name in RECORD.__dataclass_fields__}
    assert ServerRecord.parse(json.dumps(values).encode()) == RECORD
    assert ServerRecord.parse(json.dumps({**values, field: {"a": 1} if field != "models" else [1]}).encode()) is None


def test_a_folder_that_can_not_be_written_costs_the_listing_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    announcement = Announcement(tmp_path / "file" / "below", RECORD)
    announcement.update(state="ready")
    announcement.close()
    assert len(caplog.records) == 1
    assert "realizar ps does not list this server" in caplog.text
    Announcement(None, RECORD).close()
    assert running_servers(None) == []


def test_a_user_without_a_home_has_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError()))
    assert servers_folder() is None


def test_memory_counts_children() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert (tree_bytes(os.getpid()) or 0) > (tree_bytes(child) or 0) > 0
        assert tree_bytes(1 << 30) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_durations() -> None:
    assert [_duration(s) for s in (0.4, 59, 61, 3_700, 200_000)] == ["0 s", "59 s", "1 min 1 s", "1 h 1 min", "2 d 7 h"]
