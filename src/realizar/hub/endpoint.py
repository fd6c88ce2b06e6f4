"""Requests to a Hugging Face endpoint, by huggingface_hub with its own variables (HF_ENDPOINT, HF_TOKEN, ...)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from realizar.errors import HubError, UnknownModelError
from realizar.hub.names import RepositoryName

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_PART = re.compile(r"bytes (\d+)-\d+/(\d+)")


class NoRangesError(HubError):
    """A server that answers range requests with whole files."""


@contextmanager
def open_range(url: str, start: int, stop: int) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Ask for the bytes of a file from `start` to `stop`; yields the size of the whole file, and its bytes in chunks.

    A file that ends before `stop` gives fewer. NoRangesError: the server would send another part, or all of it, which
    is not read; errors of the library's are the caller's.
    """
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    headers = build_hf_headers(library_name="realizar", headers=wanted)
    with http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),  # who asks knows what is left to ask for
    ) as response:
        hf_raise_for_status(response)
        yield _whole_size(response, start, stop), response.iter_bytes()


def _whole_size(response: Any, start: int, stop: int) -> int:
    """The size of the file of which an answer is the part that was asked for; all of a short file may be."""
    part = _PART.fullmatch(response.headers.get("Content-Range", ""))
    if response.status_code == 206 and part is not None and int(part[1]) == start:
        return int(part[2])
    size = response.headers.get("Content-Length", "")
    if response.status_code == 200 and start == 0 and size.isdecimal() and int(size) <= stop:
        return int(size)
    server = urlsplit(str(response.url)).netloc
    raise NoRangesError(f"{server} does not answer range requests: it gives files as a whole only")


def translated(name: RepositoryName, call: Callable[[], Result]) -> Result:
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
    except (OSError, http_error()) as error:
        if is_transport(error):
            from huggingface_hub.constants import ENDPOINT

            raise HubError(
                f"{name} is not in the cache, and {ENDPOINT} can't be reached: {_first_line(error)}"
            ) from error
        raise HubError(f"{name}: {_first_line(error)}") from error


def is_transport(error: BaseException | None) -> bool:
    """True if an error means that no answer came at all."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, http_error()) and not isinstance(error, HfHubHTTPError)


def http_error() -> type[Exception]:
    """The base class of the HTTP errors of huggingface_hub's client, which depends on its version."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__bases__ if base is not OSError)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
