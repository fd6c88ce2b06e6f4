"""A file of keys that has no end is refused; pipes are read as files are."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from realizar.cli.options.serve import read_keys
from realizar.errors import RealizarError
from waits import HANG_S


def test_a_file_without_end() -> None:
    with pytest.raises(RealizarError, match=r"/dev/zero is larger than the 1\.0 MB of a key file"):
        read_keys(Path("/dev/zero"))


def test_keys_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "keys"
    os.mkfifo(pipe, 0o600)
    writer = threading.Thread(target=pipe.write_text, args=("# ours\nfirst\n\nsecond\n",))
    writer.start()
    assert list(read_keys(pipe)) == ["first", "second"]
    writer.join(HANG_S)
