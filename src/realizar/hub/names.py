"""Names of repositories on a Hugging Face endpoint. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    match = None if leads_elsewhere(name) else _NAME.fullmatch(name)
    return RepositoryName(match.group(1), match.group(2), match.group(3)) if match else None


def leads_elsewhere(path: str) -> bool:
    """True if a part of a name or of a file's path in a repository is empty, `.` or `..`."""
    return _ELSEWHERE.search(path) is not None
