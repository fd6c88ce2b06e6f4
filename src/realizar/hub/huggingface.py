"""Models from a Hugging Face endpoint, by huggingface_hub with its own variables (HF_HOME, HF_TOKEN, ...)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from realizar.errors import HubError, UnknownModelError
from realizar.hub.progress import Announce, Progress, RemoteFile, ignore_files
from realizar.hub.selection import select_files

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?(?::([\w./ -]+))?")
_ELSEWHERE = re.compile(r"(^|[/@:])\.{0,2}($|[/@:])")


@dataclass(frozen=True, slots=True)
class RepositoryName:
    """A name: `user/repo`, `user/repo:Q4_K_M` or `user/repo:file.gguf`; `@revision` may follow the repository."""

    repo: str
    revision: str | None
    wanted: str | None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f':{self.wanted}' if self.wanted else ''}"

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.-]", "--", str(self))


def parse_name(name: str) -> RepositoryName | None:
    """Parse a Hugging Face name; None if it is not one.

    No part of a revision or a file is empty, `.` or `..`: joined to the cache's folder it would lead elsewhere.
    """
    match = None if _ELSEWHERE.search(name) else _NAME.fullmatch(name)
    return RepositoryName(match.group(1), match.group(2), match.group(3)) if match else None


@dataclass(frozen=True, slots=True)
class Download:
    path: Path
    files: tuple[Path, ...]


def fetch(name: RepositoryName, progress: Progress, announce: Announce = ignore_files) -> Download:
    """Download the model's missing files into huggingface_hub's cache.

    UnknownModelError: no repository has the name, it is private, or lacks fitting files. HubError: it can't be fetched.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import OfflineModeIsEnabled

    api = HfApi(library_name="realizar")
    try:
        info = _translated(name, lambda: api.model_info(name.repo, revision=name.revision, files_metadata=True))
    except HubError as error:
        # Offline, or no answer: the cached files are used if they are complete.
        cause = error.__cause__
        if isinstance(cause, OfflineModeIsEnabled | ConnectionError) or _is_transport(cause):
            cached = _cached(name)
            if cached is not None:
                return cached
        raise
    listed = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    siblings = {file: sibling for file, sibling in listed.items() if not _ELSEWHERE.search(file)}
    wanted = select_files(name.repo, list(siblings), name.wanted)
    announce(Path(HF_HUB_CACHE), [_remote_file(name, siblings[file], info.sha) for file in wanted])
    return _download([_translated(name, partial(_fetch_file, name, file, progress)) for file in wanted])


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


def _is_transport(error: BaseException | None) -> bool:
    """True if an error means that no answer came at all."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, _http_error()) and not isinstance(error, HfHubHTTPError)


def _http_error() -> type[Exception]:
    """The base class of the HTTP errors of huggingface_hub's client, which depends on its version."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__bases__ if base is not OSError)


def _translated(name: RepositoryName, call: Callable[[], Result]) -> Result:
    """Run a call, and translate huggingface_hub's errors to `HubError` with the original as its cause.

    The error is UnknownModelError where the endpoint has nothing of the name, or none that it gives.
    """
    from huggingface_hub import errors

    try:
        return call()
    except errors.GatedRepoError as error:
        message = f"{name} has terms that must be accepted: accept them on its page, then set HF_TOKEN"
        raise UnknownModelError(message) from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModelError(f"{name} does not exist on the endpoint, or is private (then set HF_TOKEN)") from error
    except errors.RevisionNotFoundError as error:
        raise UnknownModelError(f"{name}: the repository has no revision {name.revision}") from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(f"{name} is not in the cache, and HF_HUB_OFFLINE is set") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 404:
            raise UnknownModelError(f"{name}: not found") from error
        raise HubError(f"{name}: HTTP {status}: {_first_line(error)}") from error
    except (errors.HFValidationError, errors.EntryNotFoundError) as error:
        raise UnknownModelError(f"{name}: {_first_line(error)}") from error
    except (OSError, _http_error()) as error:
        if _is_transport(error):
            from huggingface_hub.constants import ENDPOINT

            raise HubError(
                f"{name} is not in the cache, and {ENDPOINT} can't be reached: {_first_line(error)}"
            ) from error
        raise HubError(f"{name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


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
