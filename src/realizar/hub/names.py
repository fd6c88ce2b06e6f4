"""Names of repositories on a Hugging Face endpoint. Standard library only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?(?::([\w./ -]+))?")
_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
_PAGE = re.compile(
    r"(?P<repo>[^/:@]+/[^/:@]+)(?P<revision>@[^:/]+)?/?"
    r"(?:/?(?:tree|blob|resolve|raw|commits)/(?P<branch>[^/:]+)/?(?P<path>[^:]*)|discussions(?:/[^:]*)?)?"
    r"(?::(?P<wanted>.*))?"
)
_NO_GGUF = (".safetensors", ".json", ".md")
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
    """Parse a Hugging Face name, or the address of a page of Hugging Face; None if it is neither.

    No part of a revision or a file is empty, `.` or `..`: joined to the cache's folder it would lead elsewhere.
    """
    if is_address(name):
        name = _name_of_page(name)
    match = None if leads_elsewhere(name) else _NAME.fullmatch(name)
    return RepositoryName(match.group(1), match.group(2), match.group(3)) if match else None


def is_address(name: str) -> bool:
    """True if a name begins with a hub's host or scheme.

    As in `hf.co/user/repo:Q4_K_M`, `https://huggingface.co/user/repo` and `hf://user/repo`.
    """
    return _after_host(name) is not None


def _after_host(name: str) -> str | None:
    given = re.sub(r"^hf://", "hf.co/", name.strip(), flags=re.IGNORECASE)
    host, slash, rest = re.sub(r"^https?://", "", given, flags=re.IGNORECASE).partition("/")
    own = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    return rest if slash and host and host.lower() in (*_HOSTS, own) else None


def _name_of_page(address: str) -> str:
    """The name of the model that a page is about; a file's page names the file, of safetensors the repository."""
    match = _PAGE.fullmatch(re.split(r"[?#]", _after_host(address) or "")[0])
    if match is None:
        return ""
    branch, path = unquote(match["branch"] or ""), unquote(match["path"] or "").rstrip("/")
    revision = match["revision"] or (f"@{branch}" if branch and branch != "main" else "")
    wanted = match["wanted"] if match["wanted"] is not None else "" if path.endswith(_NO_GGUF) else path
    repo = match["repo"].removesuffix(".git")  # as `git clone` takes it
    return f"{repo}{revision}{f':{wanted}' if wanted and wanted != 'latest' else ''}"


def leads_elsewhere(path: str) -> bool:
    """True if a part of a name or of a file's path in a repository is empty, `.` or `..`."""
    return _ELSEWHERE.search(path) is not None
