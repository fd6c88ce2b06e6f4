"""Options of a server with several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import MaybeSize, refuse_given
from realizar.cli.options.serve import ServerOptions
from realizar.errors import InvalidRequestError
from realizar.gguf_names import is_later_part, models_of

_LONGEST_KEEP_ALIVE_S = 1_000_000_000  # some 30 years: lists of models tell the time of its end


@Parameter(name="*", group="Several models", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralModelsOptions:
    """Options of a server with several models, which are loaded on first use.

    Attributes:
        model_folder: folder of models, GGUF files and folders of safetensors, whose names are theirs in the API.
        memory: memory that loaded models may take together, such as 32G; default nine tenths of what is free.
        keep_alive: seconds without a request after which a model is unloaded; default when its place is needed.
        allow_pull: let clients fetch models from the network by /api/pull; all that were pulled before are served too.
        sleep_memory: host memory for weights of GPU models that make room, such as 64G; default half of what is free.
    """

    model_folder: Annotated[Path | None, Parameter(name=("--model-folder", "--models-dir"))] = None
    memory: MaybeSize = None
    keep_alive: float | None = None
    allow_pull: bool = False
    sleep_memory: MaybeSize = None

    def several(self, models: Sequence[str], server: ServerOptions) -> bool:
        """True if the server has several models; False for a single one, which is loaded at start and stays.

        It raises InvalidRequestError if no model is named, or an option does not suit the number of models.
        """
        if not models and self.model_folder is None and not self.allow_pull:
            raise InvalidRequestError("serve needs a model: its name, --model-folder, or --allow-pull", "model")
        if len(models) == 1 and self.model_folder is None and not self.allow_pull:
            refuse_given(self, ("memory", "keep_alive", "sleep_memory"), "is for several models")
            return False
        if server.replicas > 1:
            raise InvalidRequestError("--replicas above 1 serve a single model", "replicas")
        if (server.api_processes or 1) > 1:
            raise InvalidRequestError("--api-processes above 1 serve a single model", "api_processes")
        several = ", which --allow-pull does not leave single" if self.allow_pull else ""
        refuse_given(server, ("served_model_name", "chat_template"), f"is for a single model{several}")
        if self.keep_alive is not None and not 0 <= self.keep_alive <= _LONGEST_KEEP_ALIVE_S:
            limits = f"between 0 and {_LONGEST_KEEP_ALIVE_S}"
            raise InvalidRequestError(f"--keep-alive must be {limits}, not {self.keep_alive:g}", "keep_alive")
        return True

    def in_folder(self) -> list[Path]:
        """The models of the folder, by name, without later parts of a GGUF model and what lies beside one.

        It raises InvalidRequestError if it can't be read, or has none.
        """
        if self.model_folder is None:
            return []
        try:
            entries = sorted(self.model_folder.expanduser().iterdir())
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidRequestError(f"{self.model_folder} can't be read: {reason}", "model_folder") from error
        files = models_of(each.name for each in entries)
        found = [
            each
            for each in entries
            if (each / "config.json").is_file() or (each.name in files and not is_later_part(each.name))
        ]
        if not found:
            raise InvalidRequestError(f"{self.model_folder} has no model", "model_folder")
        return found
