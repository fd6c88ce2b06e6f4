"""Downloads that are cut off: connections that break, processes that are killed, bytes that are wrong."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub.fake_hub import Content, Endpoint, fake_hub
from realizar.hub.resumed import count_kept
from waits import HANG_S

CONTENT = b"GGUF" + random.Random(3).randbytes((40 << 20) + 12345)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NAME = "user/large:Q4_0"
SOON_AGAIN = """
from realizar.cli.main import main
from realizar.hub import resumed
resumed._FIRST_WAIT_S = 0.01
main()
"""
FILES: dict[str, dict[str, Content]] = {"user/large": {"m-Q4_0.gguf": CONTENT}}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with fake_hub(FILES) as endpoint:
        yield endpoint


def partial_files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "hf").rglob("*.*") if path.suffix in (".partial", ".kept"))


def check_pulled(folder: Path, result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr
    assert hashlib.sha256(Path(result.stdout.strip()).read_bytes()).hexdigest() == DIGEST
    assert partial_files(folder) == []


def test_a_download_killed_20_times_ends_whole(tmp_path: Path, endpoint: Endpoint) -> None:
    """Each time after some bytes more have come, by -9; what came is not asked for again, but for broken units."""
    draw = random.Random(5)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command, killed, most = [sys.executable, "-m", "realizar", "pull", NAME], 0, 3 << 20
    while killed < 20:
        stop_at = endpoint.sent_bytes + draw.randrange(most)
        endpoint.pace_s = 0.02
        process = subprocess.Popen(
            command,
            env=environment | endpoint.variables(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        limit = time.monotonic() + HANG_S
        while endpoint.sent_bytes <= stop_at and time.monotonic() < limit:
            assert process.poll() is None, f"it ended after {killed} times"
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += 1
    assert partial_files(tmp_path) == [".kept", ".partial"]
    endpoint.pace_s, before = 0, endpoint.sent_bytes
    result = endpoint.run(tmp_path, "pull", NAME)
    check_pulled(tmp_path, result)
    assert endpoint.sent_bytes - before < len(CONTENT)
    assert re.fullmatch(r"fetching .* \(42\.0 MB, .* here\)\nfetched .* \(.* [kM]B/s\)\n", result.stderr)


def test_what_is_kept_is_counted_to_the_byte(tmp_path: Path) -> None:
    """Progress must not pass the size: of the last unit less is there than of others."""
    size, unit = (3 << 18) + 1000, 1 << 18
    target = tmp_path / "file"
    assert count_kept(target, size) == 0
    with (tmp_path / "file.partial").open("wb") as stream:
        stream.truncate(size)
    (tmp_path / "file.kept").write_bytes(b"\0\1\0\1")
    assert count_kept(target, size) == unit + 1000
    (tmp_path / "file.kept").write_bytes(b"\1\1\1\1")
    assert count_kept(target, size) == size
    assert count_kept(target, size + 1) == 0, "of another file"


def test_connections_that_break_20_times_are_opened_again(tmp_path: Path, endpoint: Endpoint) -> None:
    draw = random.Random(7)
    endpoint.cuts = [draw.randrange(3 << 20) for _ in range(20)]  # of eight requests, and of those that go on
    result = endpoint.run(tmp_path, "pull", NAME)
    check_pulled(tmp_path, result)
    assert result.stderr.startswith("fetching m-Q4_0.gguf (42.0 MB)\n"), "nothing was here"
    assert endpoint.cuts == []
    assert endpoint.sent_bytes < len(CONTENT) + 10_000, "no byte comes twice"


def test_wrong_bytes_are_discarded_and_fetched_anew(tmp_path: Path, endpoint: Endpoint) -> None:
    for endpoint.gives_ranges in (True, False):
        endpoint.wrong = {"m-Q4_0.gguf"}
        result = endpoint.run(tmp_path, "pull", NAME)
        assert result.returncode == 1
        assert f"instead of {DIGEST}; the download was discarded" in result.stderr
        assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
        endpoint.wrong = set()
    check_pulled(tmp_path, endpoint.run(tmp_path, "pull", NAME))


def test_a_digest_that_leads_elsewhere_is_refused(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.digests = {"m-Q4_0.gguf": "../../../../over-there"}
    result = endpoint.run(tmp_path, "pull", NAME)
    assert result.returncode == 1
    assert "lists a file with the SHA-256 '../../../../over-there', which is none" in result.stderr
    assert not list(tmp_path.rglob("over-there*"))


@pytest.mark.parametrize("size", [1 << 62, 1 << 50])
def test_a_size_for_which_there_is_no_room_is_one_line(tmp_path: Path, endpoint: Endpoint, size: int) -> None:
    endpoint.sizes = {"m-Q4_0.gguf": size}
    result = endpoint.run(tmp_path, "pull", NAME)
    assert result.returncode == 1
    assert re.fullmatch(r"realizar: the model takes .* of disk, and .* are free\n", result.stderr), result.stderr


def test_a_server_without_ranges_gives_whole_files(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.gives_ranges = False
    check_pulled(tmp_path, endpoint.run(tmp_path, "pull", NAME))


def test_a_server_that_sends_nothing_more_is_one_line(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.cuts = [0] * 1000
    result = endpoint.run(tmp_path, "pull", NAME, program=("-c", SOON_AGAIN))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"realizar: {NAME}"), result.stderr
