"""`RouteWish`: what the router has to know of a request. It goes with it, and the front keeps it up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realizar.ray.reported_keys import KEY_BYTES
from realizar.replicas.prompt_keys import prompt_keys
from realizar.request import Request


@dataclass(slots=True, eq=False)
class RouteWish:
    """The router of the same process reads this; a replica gets a copy of how it was when the request was sent.

    Attributes:
        keys: of the full blocks of the prompt, as in reports.
        num_tokens: of the prompt.
        num_choices: of the request.
        avoided: name of a replica that has just lost the request, or None.
        has_begun: its first tokens have come. has_ended: nothing of it is open any more.
    """

    keys: Sequence[bytes]
    num_tokens: int
    num_choices: int
    avoided: str | None = None
    has_begun: bool = False
    has_ended: bool = False


def wish_of(request: Request, block_tokens: int, avoided: str | None) -> RouteWish:
    """The wish of a request. Args: block_tokens: of the engines' prefix caches; 0 without one."""
    keys = tuple([key[:KEY_BYTES] for key in prompt_keys(request, block_tokens)])
    return RouteWish(keys, request.num_prompt_tokens, request.sampling.n, avoided)
