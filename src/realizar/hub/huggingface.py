"""Models from a Hugging Face endpoint, by huggingface_hub with its own variables (HF_HOME, HF_TOKEN, ...)."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from realizar.errors import HubError
from realizar.hub.endpoint import NoRangesError, is_transport, translated
from realizar.hub.names import RepositoryName, leads_elsewhere
from realizar.hub.progress import Announce, Progress, RemoteFile, check_room
from realizar.hub.resumed import ResumedFile, count_kept, sha256_of
from realizar.hub.selection import Room, select_files


@dataclass(frozen=True, slots=True)
class Download:
    path: Path
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model in a repository's commit, with the one to open first."""

    commit: str | None
    files: tuple[RemoteFile, ...]


def find(name: RepositoryName, room: Room | None = None, *, towers: bool = True) -> Listing | Download:
    """Look a model up; it is a `Download` where no answer comes and all its files are in huggingface_hub's cache.

    `room` and `towers` are those of `select_files`.

    UnknownModelError: no repository has the name, it is private, or lacks fitting files. HubError: no answer comes.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    api = HfApi(library_name="realizar")
    try:
        info = translated(name, lambda: api.model_info(name.repo, revision=name.revision, files_metadata=True))
    except HubError as error:
        # Offline, or no answer: the cached files are used if they are complete.
        cause = error.__cause__
        if isinstance(cause, OfflineModeIsEnabled | ConnectionError) or is_transport(cause):
            cached = _cached(name, towers=towers)
            if cached is not None:
                return cached
        raise
    listed = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    siblings = {file: sibling for file, sibling in listed.items() if not leads_elsewhere(file)}
    sizes = {file: sibling.size for file, sibling in siblings.items()}
    wanted = select_files(name.repo, sizes, name.wanted, room, towers=towers)
    return Listing(info.sha, tuple(_remote_file(name, siblings[file], info.sha) for file in wanted))


def fetch(
    name: RepositoryName,
    progress: Progress,
    announce: Announce = check_room,
    room: Room | None = None,
    *,
    towers: bool = True,
) -> Download:
    """Download the model's missing files into huggingface_hub's cache; raises as `find`."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = find(name, room, towers=towers)
    if isinstance(found, Download):
        return found
    announce(Path(HF_HUB_CACHE), found.files)
    return _download(
        [translated(name, partial(_fetch_file, name, file, found.commit, progress)) for file in found.files]
    )


def _remote_file(name: RepositoryName, sibling: Any, commit: str | None) -> RemoteFile:
    from huggingface_hub import try_to_load_from_cache

    size, missing = sibling.size, sibling.size or 0
    digest = None if sibling.blob_id is None else f"sha1:{sibling.blob_id}"
    if sibling.lfs is not None:
        digest = f"sha256:{sibling.lfs.sha256}"
        missing -= count_kept(_blob(name, sibling.lfs.sha256), missing)
    if isinstance(try_to_load_from_cache(name.repo, sibling.rfilename, revision=commit), str):
        missing = 0
    return RemoteFile(sibling.rfilename, size, missing, digest)


def _fetch_file(name: RepositoryName, file: RemoteFile, commit: str | None, progress: Progress) -> Path:
    """Fetch a file; those that are not small are verified. The library links what is in its place already."""
    from huggingface_hub import hf_hub_download

    kind, _, digest = (file.digest or "").partition(":")
    blob = _blob(name, digest) if kind == "sha256" else None
    is_new = blob is not None and not blob.exists()
    if blob is not None and is_new and file.size_bytes:
        with suppress(NoRangesError):
            _fetch_blob(name, file, blob, commit, progress)
            is_new = False
    bar = _bar_class(progress, file.label)
    path = Path(hf_hub_download(name.repo, file.label, revision=name.revision, tqdm_class=bar, library_name="realizar"))
    if is_new and (found := sha256_of(path)) != digest:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise HubError(f"{file.label} has SHA-256 {found} instead of {digest}; the download was discarded")
    return path


def _fetch_blob(name: RepositoryName, file: RemoteFile, blob: Path, commit: str | None, progress: Progress) -> None:
    """Fetch a file to the place where huggingface_hub would put its content, under the library's own lock."""
    from filelock import FileLock
    from huggingface_hub import hf_hub_url

    size = file.size_bytes or 0
    lock = blob.parents[2] / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if not blob.exists():
            url = hf_hub_url(name.repo, file.label, revision=commit)
            ResumedFile(url, blob, size, blob.name).fetch(lambda done: progress(file.label, done, size))


def _blob(name: RepositoryName, digest: str) -> Path:
    """The place of a file's content in huggingface_hub's cache; HubError for what is no SHA-256."""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise HubError(f"{name.repo} lists a file with the SHA-256 {digest[:80]!r}, which is none")
    return _cache_folder(name) / "blobs" / digest


def _cache_folder(name: RepositoryName) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")


def _download(files: list[Path]) -> Download:
    path = files[0] if files[0].suffix.lower() == ".gguf" else files[0].parent
    return Download(path, tuple(files))


def _cached(name: RepositoryName, *, towers: bool) -> Download | None:
    """The model in huggingface_hub's cache, without network access; None if it is not there."""
    folder = _cache_folder(name)
    revision = name.revision or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    if not names:
        return None
    files = select_files(name.repo, dict.fromkeys(names), name.wanted, towers=towers)
    return _download([snapshot / file for file in files])


def _bar_class(progress: Progress, label: str) -> type[Any]:
    """Make a progress bar class for huggingface_hub that reports to `progress` and draws nothing."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True  # draws nothing and counts nothing: the count is ours
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            self.done, self.size = int(kwargs.get("initial") or 0), kwargs.get("total")

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            progress(label, self.done, self.size)
            return None

    return Bar
