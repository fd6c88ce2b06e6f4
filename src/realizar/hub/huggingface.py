"""Models from a Hugging Face endpoint, by huggingface_hub with its own variables (HF_HOME, HF_TOKEN, ...)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from realizar.errors import HubError
from realizar.hub.endpoint import is_transport, translated
from realizar.hub.names import RepositoryName, leads_elsewhere
from realizar.hub.progress import Announce, Progress, RemoteFile, ignore_files
from realizar.hub.selection import select_files


@dataclass(frozen=True, slots=True)
class Download:
    path: Path
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model in a repository's commit, with the one to open first."""

    commit: str | None
    files: tuple[RemoteFile, ...]


def find(name: RepositoryName) -> Listing | Download:
    """Look a model up; it is a `Download` where no answer comes and all its files are in huggingface_hub's cache.

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
            cached = _cached(name)
            if cached is not None:
                return cached
        raise
    listed = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    siblings = {file: sibling for file, sibling in listed.items() if not leads_elsewhere(file)}
    wanted = select_files(name.repo, list(siblings), name.wanted)
    return Listing(info.sha, tuple(_remote_file(name, siblings[file], info.sha) for file in wanted))


def fetch(name: RepositoryName, progress: Progress, announce: Announce = ignore_files) -> Download:
    """Download the model's missing files into huggingface_hub's cache; raises as `find`."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = find(name)
    if isinstance(found, Download):
        return found
    announce(Path(HF_HUB_CACHE), found.files)
    return _download([translated(name, partial(_fetch_file, name, file.label, progress)) for file in found.files])


def _remote_file(name: RepositoryName, sibling: Any, commit: str | None) -> RemoteFile:
    from huggingface_hub import try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name.repo, sibling.rfilename, revision=commit), str)
    digest = None if sibling.blob_id is None else f"sha1:{sibling.blob_id}"
    if sibling.lfs is not None:
        digest = f"sha256:{sibling.lfs.sha256}"
    return RemoteFile(sibling.rfilename, sibling.size, 0 if cached else sibling.size or 0, digest)


def _fetch_file(name: RepositoryName, file_name: str, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download

    bar = _bar_class(progress, file_name)
    return Path(hf_hub_download(name.repo, file_name, revision=name.revision, tqdm_class=bar, library_name="realizar"))


def _download(files: list[Path]) -> Download:
    path = files[0] if files[0].suffix.lower() == ".gguf" else files[0].parent
    return Download(path, tuple(files))


def _cached(name: RepositoryName) -> Download | None:
    """The model in huggingface_hub's cache, without network access; None if it is not there."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")
    revision = name.revision or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    if not names:
        return None
    return _download([snapshot / file for file in select_files(name.repo, names, name.wanted)])


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
