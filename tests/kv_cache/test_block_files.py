"""Files of blocks: whatever becomes of one costs its own reuse, and nothing that is not a block is ever removed."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from realizar.errors import InvalidRequestError
from realizar.kv_cache import block_files
from realizar.kv_cache.block_files import BlockFiles, sampled_digest

SIZE = 10_000


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def contents_of(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def is_read(files: BlockFiles, number: int, part: int = 0, size: int = SIZE) -> bool:
    """True where what is read is what was written; False where nothing is."""
    into = np.zeros(size, np.uint8)
    (found,) = files.read([key_of(number)], part, into[None])
    assert not found or (into == contents_of(number, size)).all()
    return found


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, SIZE])
def test_contents_come_back(tmp_path: Path, size: int) -> None:
    files = BlockFiles(tmp_path, "model")
    assert files.write(key_of(1), 2, contents_of(1, size))
    assert files.has(key_of(1), 2)
    assert is_read(files, 1, 2, size)
    assert not files.has(key_of(1), 1)
    assert not is_read(files, 1, 1, size)
    assert not is_read(BlockFiles(tmp_path, "another"), 1, 2, size)
    again = BlockFiles(tmp_path, "model")
    assert is_read(again, 1, 2, size)


def test_what_is_cleared_is_found_no_more_and_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what was being written, by this process or another; a process that was killed leaves it to the next."""
    files, another, model = (
        BlockFiles(tmp_path, "model"),
        BlockFiles(tmp_path, "model"),
        BlockFiles(tmp_path, "model 2"),
    )
    for each in (files, model):
        assert each.write(key_of(1), 0, contents_of(1))
    digest = block_files._digest

    def cleared(*given: object) -> bytes:
        monkeypatch.setattr(block_files, "_digest", digest)
        files.clear()
        return digest(*given)  # type: ignore[arg-type]

    for each in (files, another):
        monkeypatch.setattr(block_files, "_digest", cleared)
        generation = each.generation
        assert not each.write(key_of(2), 0, contents_of(2), generation)
        assert not any(each.has(key_of(number), 0) for number in (1, 2))
    assert not files.write(key_of(3), 0, contents_of(3), generation=0), "what was computed before it is not kept later"
    assert len(list(tmp_path.rglob("*.0*"))) > 1
    assert another.takes_more
    assert another.write(key_of(4), 0, contents_of(4))
    again = BlockFiles(tmp_path, "model")
    assert sorted(path.name for path in tmp_path.rglob("*.0*")) == [f"{key_of(n).hex()}.0" for n in (1, 4)]
    assert is_read(again, 4)
    assert is_read(model, 1)
    assert len(list((tmp_path / block_files._FOLDER).iterdir())) == 2
    assert not caplog.records


def test_every_damage_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit, a page of zeros, two pages in each other's place, too few and too many bytes, another's file."""
    files, rng = BlockFiles(tmp_path, "model"), random.Random(3)

    def damaged(what: str, data: bytearray) -> bytearray:
        place = rng.randrange(len(data))
        if what == "bit":
            data[place] ^= 1 << rng.randrange(8)
        elif what == "zeros":
            data[4096:8192] = bytes(4096)
        elif what == "pages":
            data[:4096], data[4096:8192] = data[4096:8192], data[:4096]
        elif what == "less":
            del data[place:]
        elif what == "more":
            data.append(7)
        return data

    kinds = [*["bit"] * 40, "zeros", "pages", *["less"] * 5, "more", "other"]
    for number, what in enumerate(kinds):
        files.write(key_of(number), 0, contents_of(number))
        (path,) = tmp_path.rglob(f"{key_of(number).hex()}.0")
        if what == "other":
            (other,) = tmp_path.rglob(f"{key_of(number).hex()}.0")
            files.write(key_of(number + 1), 0, contents_of(number + 1))
            (path,) = tmp_path.rglob(f"{key_of(number + 1).hex()}.0")
            path.write_bytes(other.read_bytes())
            number += 1
        else:
            path.write_bytes(damaged(what, bytearray(path.read_bytes())))
        caplog.clear()
        assert not is_read(files, number)
        assert [record.getMessage() for record in caplog.records] == [f"{path} is damaged and is removed"]
        assert not path.exists()


def test_a_bound_removes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    """Of all models, and no file that is not a block's."""
    for name in ("one", "two"):
        files = BlockFiles(tmp_path, name, 1 << 40)
        for number in range(10):
            files.write(key_of(number), 0, contents_of(number))
    foreign = files._own / "notes.txt"
    foreign.write_bytes(bytes(10 * SIZE))
    for age, number in enumerate((3, 7)):
        (path,) = tmp_path.rglob(f"two/*/{key_of(number).hex()}.0")
        os.utime(path, (1000 + age, 1000 + age))
    files.used([key_of(3), key_of(99)], 0)
    bounded = BlockFiles(tmp_path, "two", 19 * (SIZE + 32))
    assert bounded.has(key_of(3), 0)
    assert not bounded.has(key_of(7), 0)
    left = [path for path in tmp_path.rglob("*.0") if path.is_file()]
    assert len(left) <= 18
    for number in range(10, 40):  # writing looks at the bound too
        bounded.write(key_of(number), 0, contents_of(number))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.0")) <= 20 * (SIZE + 32)
    assert foreign.exists()


def test_a_disk_that_refuses_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a file here, as a full disk does."""
    files = BlockFiles(tmp_path, "model")
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        assert not files.write(key_of(1), 0, contents_of(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not files.takes_more
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'realizar-blocks'} takes no blocks for 60 s: File too large"
    ]
    assert not list(tmp_path.rglob("*.0*"))
    now[0] += 61
    assert files.takes_more


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "realizar-blocks").mkdir()
    (tmp_path / "realizar-blocks").chmod(0o777)
    with pytest.raises(InvalidRequestError, match="it must belong to this user, and no one else may write there"):
        BlockFiles(tmp_path, "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match=r"cache_dir .*file can't be used"):
        BlockFiles(tmp_path / "file", "model")
    made = BlockFiles(tmp_path / "new", "model")
    made.write(key_of(1), 0, contents_of(1))
    for path in (tmp_path / "new").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_killed_writer_leaves_whole_files_or_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = (
        "import sys, numpy as np; from pathlib import Path; from realizar.kv_cache.block_files import BlockFiles\n"
        "files = BlockFiles(Path(sys.argv[1]), 'model'); print('writes', flush=True)\n"
        "for number in range(10**6):\n"
        "    contents = np.random.default_rng(number % 50).integers(0, 256, 1_000_000, np.uint8)\n"
        "    files.write((number % 50).to_bytes(32, 'big'), 0, contents)\n"
    )
    for round_number in range(3):
        with subprocess.Popen([sys.executable, "-c", writer, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.05 + 0.03 * round_number)
            process.send_signal(signal.SIGKILL)
    files = BlockFiles(tmp_path, "model")
    for number in range(50):
        is_read(files, number, size=1_000_000)
    assert not caplog.records
    for path in tmp_path.rglob("*.0.*"):  # what was being written
        os.utime(path, (1000, 1000))
    BlockFiles(tmp_path, "model")
    assert not list(tmp_path.rglob("*.0.*"))


def test_a_sample_differs_where_weights_do(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    data = bytearray(np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8).tobytes())
    path.write_bytes(data)
    os.utime(path, (1000, 1000))
    first = sampled_digest(path)
    data[2 << 20 :] = data[2 << 20 :][::-1]
    path.write_bytes(data)
    os.utime(path, (1000, 1000))
    assert sampled_digest(path) != first
    path.write_bytes(bytes(data[:-1]))
    os.utime(path, (1000, 1000))
    assert sampled_digest(path) != first
