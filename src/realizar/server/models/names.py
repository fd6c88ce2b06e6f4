"""Names of models in requests: the error of a name that is not served."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from realizar.server.errors import ApiError


def not_served(name: str, names: Sequence[str], shown: Sequence[str]) -> ApiError:
    """The 404 of a model that is not served.

    Args:
        names: all names that requests may use. shown: those that the message lists where none is near.
    """
    near = difflib.get_close_matches(name[:200], names, 1)
    listed = ", ".join(f"'{each}'" for each in shown)
    hint = f" (did you mean '{near[0]}'?)" if near else f" (this server has {listed})"
    return ApiError(404, f"The model {name[:200]!a} does not exist{hint}", param="model", code="model_not_found")
