"""Fields of requests that nothing knows: refused by name, or left out and logged once each (`--unknown-fields`)."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

from realizar.server.errors import ApiError, refused, unsupported

_LOG = logging.getLogger(__name__)
_MOST_LOGGED = 1000  # a client that invents names must not fill the memory or the log
_MOST_NAMED = 200  # characters
_HELD = ("thread", "conversation", "previous_response_id", "previous_message_id", "previous_interaction_id")
"""Fields by which a client says that the server has the rest of the conversation: without it an answer is wrong."""
_PLACES = re.compile(r"\[\d+\]|\.\d+(?=\.|$)")


class IgnoredFields:
    """Notes unknown fields that were left out, and logs the first request with each."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, path: str, value: object) -> None:
        """Note a field by its path, of which places in lists don't count.

        ApiError 400: it names an earlier part of the conversation, which must not be left out without a word.
        """
        if path in _HELD and value is not None:
            raise unsupported(path, "is not supported here: send the whole conversation")
        path = _PLACES.sub("[]", path)
        if path in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add(path)
        _LOG.warning("requests have the unknown field %s; it is left out, which is logged once", path)


IGNORED: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)
"""What the request at hand does about unknown fields; None refuses them."""


def unknown_field(path: str, name: str, known: Collection[str]) -> ApiError:
    full = full_path(path, name)
    near = difflib.get_close_matches(name[:80], known, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return refused(f"Unrecognized request argument supplied: {full}{hint}", full, "unknown_parameter")


def known_only(path: str, given: dict[str, Any], known: Collection[str]) -> None:
    """Refuse an object with fields that are not known, or remove these where requests may have them.

    It raises ApiError 400 with `param`, the path of the field.
    """
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    ignored = IGNORED.get()
    if ignored is None:
        raise unknown_field(path, unknown[0], known)
    for name in unknown:
        ignored.note(full_path(path, name), given.pop(name))


def full_path(path: str, name: str) -> str:
    """The path of a field within the object at a path, as errors and the log name it."""
    return ascii(f"{path}.{name}" if path else name)[1:-1][:_MOST_NAMED]
