"""The entry point: it runs the command and turns errors into exit statuses.

Exit statuses: 0 done, 1 an error (one line on stderr), 2 a wrong command line, 130 interrupted, 141 stdout was closed
by its consumer. A server that was stopped by a second signal ends with 128 plus the signal's number.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from realizar import __version__
from realizar.cli.terminal.printable import PrintableFormatter, error_line
from realizar.errors import RealizarError

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection

_MODEL_OPTIONS = ("-m", "-hf", "-hfr", "--hf-repo")
_ENOUGH_ADDRESSES = 4 << 30
_Shell = Literal["bash", "zsh", "fish"]

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


_COMMANDS = {
    "run": ("run", "run_command"),
    "chat": ("chat", "chat_command"),
    "serve": ("serve", "serve_command"),
    "launch": ("launch", "launch_command"),
    "ps": ("ps", "ps_command"),
    "pull": ("pulled", "pull_command"),
    "list": ("pulled", "list_command"),
    "rm": ("pulled", "rm_command"),
    "show": ("inspect", "show_command"),
    "inspect": ("inspect", "inspect_model"),
    "plan": ("plan", "plan_command"),
    "tokenize": ("score", "tokenize_command"),
    "score": ("score", "score_command"),
    "perplexity": ("score", "perplexity_command"),
    "bench": ("bench", "bench_command"),
    "bench-serve": ("bench_serve", "bench_serve_command"),
    "profile": ("bench", "profile_command"),
    "trace": ("bench", "trace_command"),
    "tune": ("bench", "tune_command"),
    "doctor": ("doctor", "doctor_command"),
}
"""Modules of `cli/commands` and their functions: one is imported when its command is used."""


def _shown_default(value: object) -> str | None:
    """A default as the help text shows it; None for switches that are off and empty lists."""
    return None if value is False or value is None or value == () else str(value)


app = App(
    name="realizar",
    help="Run GGUF and safetensors language models. MODEL is a path, a pulled name or a Hugging Face name.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    help_format="plaintext",
    default_parameter=Parameter(show_default=_shown_default),
)


def _help_of(module: str, function: str) -> str:
    """The docstring of a command, from its source: to list the commands would import all of them otherwise."""
    text = (Path(__file__).parent / "commands" / f"{module}.py").read_text(encoding="utf-8")
    found = re.search(rf'^def {function}\(.*?^    """(.*?)"""', text, re.DOTALL | re.MULTILINE)
    return inspect.cleandoc(found[1]) if found else ""


def _serve_sources(application: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    from realizar.cli.commands.serve import SOURCES

    SOURCES(application, commands, arguments)


for _name, (_module, _function) in _COMMANDS.items():
    app.command(
        f"realizar.cli.commands.{_module}:{_function}",
        name=_name,
        help=_help_of(_module, _function),
        config=(_serve_sources,) if _name == "serve" else None,
    )


@app.command(name="completion")
def _completion_command(shell: Annotated[_Shell, Parameter(help="The shell to complete in.")], /) -> None:
    """Write a completion script: `source <(realizar completion bash)`, `realizar completion fish | source`."""
    text = app.generate_completion(prog_name="realizar", shell=shell)
    if shell == "zsh":
        text = text.replace(_ZSH_VALUES, _ZSH_PATHS) + _ZSH_END
    elif shell == "fish":
        text += _FISH_END
    print(text, end="")


def main(arguments: Sequence[str] | None = None) -> None:
    sys.exit(run_app(app, sys.argv[1:] if arguments is None else arguments))


def run_app(application: App, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; every error that is not a bug is one line on stderr."""
    try:
        _open_standard_streams()
        if logging.lastResort is not None:  # the handler that shows warnings of commands without a log of their own
            logging.lastResort.setFormatter(PrintableFormatter("realizar: %(message)s"))
        # A terminal that lacks a character shows `?`. Bytes that are not UTF-8 are refused where they are used.
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors=errors)
        result = application(_with_model_first(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        return _fail(f"too many arguments: {words} (a text of several words needs quotes; {_see_help(error)})", 2)
    except CycloptsError as error:
        return _fail(f"{error_line(error)} ({_see_help(error)})", 2)
    except RealizarError as error:
        return _fail(error_line(error), 1)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, so stdout is redirected to nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        return _fail(said + _memory_limit(), 1)
    except MemoryError:
        return _fail("out of memory" + _memory_limit(), 1)
    except (SystemError, RuntimeError, ImportError) as error:
        # Libraries and Python itself raise these errors when an allocation fails. Without a limit it is a bug.
        if limit := _memory_limit():
            return _fail(f"{error_line(error)}{limit}", 1)
        raise
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def _with_model_first(arguments: Sequence[str]) -> list[str]:
    """A command line as other programs' pages write it: the model after `-m` or `-hf` is the command's first argument.

    That of `launch` is a client, and its model an option.
    """
    words = list(arguments)
    for place, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name == "-m" and place > 1 and (not words[1].startswith("-") or words[place - 1].startswith("-")):
            continue  # there is a model before it, or it is another option's value
        if name in _MODEL_OPTIONS and place and (equals or place + 1 < len(words)):
            model = value if equals else words[place + 1]
            before, after = words[1:place], words[place + (1 if equals else 2) :]
            given = [*before, "--model", model] if words[0] == "launch" else [model, *before]
            return [words[0], *given, *after]
    return words


def _see_help(error: CycloptsError) -> str:
    return " ".join(("see realizar", *(error.command_chain or ()), "--help"))


def _open_standard_streams() -> None:
    """Open closed standard streams (`<&-`) on /dev/null, so that no other file gets their descriptors."""
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


def _memory_limit() -> str:
    """A hint to append to an error, if `ulimit -v` allows this process less memory than a small model needs."""
    if sys.platform == "win32":
        return ""
    import resource

    from realizar.sizes import format_bytes

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit > _ENOUGH_ADDRESSES:
        return ""
    given = format_bytes(limit)
    return f" (ulimit -v allows this process {given} of address space; even a small model needs 1.5 GB)"


def _fail(message: str, status: int) -> int:
    print(f"realizar: {error_line(message)}", file=sys.stderr)
    return status
