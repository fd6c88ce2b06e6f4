"""`realizar rm`: delete a pulled model."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import PulledModel
from realizar.cli.terminal.printable import printable
from realizar.errors import InvalidRequestError
from realizar.sizes import format_bytes


def rm_command(
    model: PulledModel,
    /,
    *,
    yes: Annotated[bool, Parameter(name=("--yes", "-y"), negative=(), help="Delete without asking.")] = False,
) -> None:
    """Delete a pulled model's files.

    Models from Hugging Face lie in its cache, which other programs read too: there it asks first.
    """
    from realizar.hub.remove import plan_removal, remove

    removal = plan_removal(model)
    size, name = format_bytes(removal.size_bytes), printable(removal.name)
    if removal.shared_folder is not None and not yes:
        question = f"delete {name}, {size}, from {printable(removal.shared_folder)}, which other programs may read too?"
        if not sys.stdin.isatty():
            raise InvalidRequestError(f"{question} (--yes does)")
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was deleted", file=sys.stderr)
            return
    remove(removal)
    print(f"removed {name} ({size})")
