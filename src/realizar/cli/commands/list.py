"""`realizar list` shows the pulled models and the short names."""

from __future__ import annotations

import json

from realizar.cli.options.arguments import Json
from realizar.cli.terminal.printable import printable
from realizar.sizes import format_bytes


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
