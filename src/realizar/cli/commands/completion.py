"""`realizar completion` writes a script by which a shell completes commands and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import App, Parameter

Shell = Literal["bash", "zsh", "fish"]

_ZSH_VALUES = "(( ${#_cyc_vals} )) && compadd -d _cyc_disp -a _cyc_vals"
_ZSH_PATHS = """_cyc_disp=(${(M)_cyc_vals:#*/}) _cyc_vals=(${_cyc_vals:#*/})
    (( ${#_cyc_disp} )) && compadd -S '' -a _cyc_disp
    (( ${#_cyc_vals} )) && compadd -a _cyc_vals"""
_ZSH_END = """
if [[ $funcstack[1] == _realizar ]]; then
  _cyclopts_realizar "$@"
else
  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
  compdef _cyclopts_realizar realizar
fi
"""
"""cyclopts' script defines a function and leaves it at that. It has to be called where the script is a file `_realizar`
in `$fpath`, and to be registered where it is sourced."""
_FISH_END = "\ncomplete -c realizar -n __fish_use_subcommand -f\n"
"""Where a command is to be named, cyclopts' script offers files too."""


def make_completion_command(application: App) -> Callable[[Shell], None]:
    """The command that completes the commands of an application."""

    def completion_command(shell: Annotated[Shell, Parameter(help="The shell to complete in.")], /) -> None:
        """Write a completion script: `source <(realizar completion bash)`, `realizar completion fish | source`."""
        text = application.generate_completion(prog_name="realizar", shell=shell)
        if shell == "zsh":
            text = text.replace(_ZSH_VALUES, _ZSH_PATHS) + _ZSH_END
        elif shell == "fish":
            text += _FISH_END
        print(text, end="")

    return completion_command
