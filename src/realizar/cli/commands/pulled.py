"""`realizar pull`, `list` and `rm`: models in the cache."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import Json, Model, PulledModel
from realizar.cli.options.loading import free_room
from realizar.cli.terminal.printable import printable
from realizar.cli.terminal.progress import download_progress
from realizar.errors import InvalidRequestError
from realizar.sizes import format_bytes


def pull_command(model: Model, /, *, as_json: Json = False) -> None:
    """Fetch a model into the cache and print its path."""
    from realizar.hub.pull import pull

    with download_progress() as progress:
        path = pull(model, progress, free_room)
    print(
        json.dumps({"name": model, "path": str(path)}) if as_json else printable(path) if sys.stdout.isatty() else path
    )


def list_command(*, as_json: Json = False) -> None:
    """List the models that were pulled, and those that a short name pulls."""
    from realizar.hub.pull import list_models

    models = list_models()
    if as_json:
        records = [
            {
                "name": model.name,
                "path": None if model.path is None else str(model.path),
                "size_bytes": model.size_bytes,
                "source": model.source,
                "chat_template": model.has_chat_template,
            }
            for model in models
        ]
        print(json.dumps({"models": records}))
        return
    width = max(len(printable(model.name)) for model in models)
    for model in models:
        note = " (base model: no chat template, run --raw)" if model.has_chat_template is False else ""
        place = "not pulled" if model.path is None else printable(model.path)
        print(f"{printable(model.name):<{width}}  {format_bytes(model.size_bytes):>9}  {place}{note}")


def rm_command(
    model: PulledModel,
    /,
    *,
    yes: Annotated[bool, Parameter(name=("--yes", "-y"), negative=(), help="Delete without asking.")] = False,
) -> None:
    """Delete a pulled model's files.

    Models from Hugging Face lie in its cache, which other programs read too: there it asks first.
    """
    from realizar.hub.pull import plan_removal, remove

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
