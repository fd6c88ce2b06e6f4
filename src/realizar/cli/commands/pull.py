"""`realizar pull` fetches a model; its path is the last line of stdout."""

from __future__ import annotations

import json
import sys

from realizar.cli.options.arguments import Json, Model
from realizar.cli.terminal.printable import printable
from realizar.cli.terminal.progress import download_progress


def pull_command(model: Model, /, *, as_json: Json = False) -> None:
    """Fetch a model into the cache and print its path."""
    from realizar.hub.pull import pull

    with download_progress() as progress:
        path = pull(model, progress)
    print(
        json.dumps({"name": model, "path": str(path)}) if as_json else printable(path) if sys.stdout.isatty() else path
    )
