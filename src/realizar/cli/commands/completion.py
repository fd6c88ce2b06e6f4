"""`realizar completion` writes a script by which a shell completes commands and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import App, Parameter

Shell = Literal["bash", "zsh", "fish"]


def make_completion_command(application: App) -> Callable[[Shell], None]:
    """The command that completes the commands of an application."""

    def completion_command(shell: Annotated[Shell, Parameter(help="The shell to complete in.")], /) -> None:
        """Write a completion script: `source <(realizar completion bash)`, `realizar completion fish | source`."""
        print(application.generate_completion(prog_name="realizar", shell=shell), end="")

    return completion_command
