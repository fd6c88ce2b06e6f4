"""`realizar pull`, `list` and `rm`: models in the cache."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import ArgumentCollection, Group, Parameter

from realizar.cli.options.arguments import Json, Model, PulledModel
from realizar.cli.options.loading import free_room
from realizar.cli.terminal.printable import printable
from realizar.cli.terminal.progress import download_progress
from realizar.errors import InvalidRequestError
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.backends.devices import ChosenDevice
    from realizar.checkpoint.checkpoint import StoredTensor


def _check_one(arguments: ArgumentCollection) -> None:
    if len(arguments.filter_by(value_set=True)) != 1:
        raise ValueError("Name a model, or list what this machine can run by --recommend, not both")


_WANTED = Group("Model", validator=_check_one)


def pull_command(
    model: Annotated[Model | None, Parameter(group=_WANTED)] = None,
    /,
    *,
    recommend: Annotated[
        bool,
        Parameter(
            negative=(),
            group=_WANTED,
            help="List models that this machine can run, and how fast, in place of fetching.",
        ),
    ] = False,
    mmproj: Annotated[
        Literal["auto", "none"], Parameter(help="none leaves an encoder of images that lies beside the model.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Fetch a model into the cache, with an encoder of images and a drafter that lie beside it, and print its path."""
    if model is None or recommend:
        _recommend(as_json=as_json)
        return
    from realizar.hub.pull import pull

    with download_progress() as progress:
        path = pull(model, progress, free_room, towers=mmproj == "auto")
    print(
        json.dumps({"name": model, "path": str(path)}) if as_json else printable(path) if sys.stdout.isatty() else path
    )


@dataclass(frozen=True, slots=True)
class _Recommended:
    """A published model at 4 bits.

    Attributes:
        file_bytes: of a GGUF file. needed_bytes: of memory before any request.
        parameters: in all. active_parameters: those that a token goes through.
        longest_context: of a request that fits, in tokens; 0 where none does.
        most_tokens_per_s: of one stream on a CPU, by what a token reads; None on a GPU.
    """

    name: str
    file_bytes: int
    needed_bytes: int
    parameters: int
    active_parameters: int
    longest_context: int
    most_tokens_per_s: float | None


_SHORTEST_CONTEXT, _LEAST_TOKENS_PER_S = 8192, 10.0
"""What a model has to have here to be recommended."""


def _recommend(*, as_json: bool) -> None:
    from realizar.backends.bandwidth import memory_bandwidth
    from realizar.backends.device_choice import choose_device
    from realizar.backends.select import free_room
    from realizar.models.generated.shapes import PUBLISHED

    device = choose_device("auto")
    free, bandwidth = free_room(), memory_bandwidth() if device.kind == "cpu" else None
    planned = (_planned(key, name, device, free, bandwidth) for key, name in PUBLISHED.items())
    models = [each for each in planned if each is not None]
    models.sort(key=lambda each: each.parameters, reverse=True)
    best = next(filter(_is_recommended, models), None)
    if as_json:
        record = {"device": device.label, "free_bytes": free, "bandwidth_gb_per_s": bandwidth}
        print(json.dumps({**record, "best": best and best.name, "models": [asdict(each) for each in models]}))
        return
    at = "" if bandwidth is None else f", read at {bandwidth:.1f} GB/s"
    print(f"{format_bytes(free)} of memory are free on {device.label}{at}\n")
    print(f"{'model':<16}  {'file':>9}  {'parameters':>20}  {'context':>7}  tokens/s at most")
    for each in models:
        parameters = " of ".join(f"{count / 1e9:.1f}" for count in sorted({each.active_parameters, each.parameters}))
        speed = "-" if each.most_tokens_per_s is None else f"{each.most_tokens_per_s:.0f}"
        fits = (f"{each.longest_context:>7}", speed) if each.longest_context else ("   does", "not fit")
        print(f"{each.name:<16}  {format_bytes(each.file_bytes):>9}  {parameters + ' billion':>20}  {'  '.join(fits)}")
    if best is not None:
        print(f"\nthe largest of them that this machine runs well: {best.name}")
    print("files are those of Q4_K_M, or of MXFP4 for gpt-oss; `realizar plan hf.co/OWNER/REPO` looks at a repository")


def _planned(key: str, name: str, device: ChosenDevice, free: int, bandwidth: float | None) -> _Recommended | None:
    """Plan for a model by its shape: no file is read. None where the device does not run the kind."""
    from realizar.backends.select import plan_memory, refusal, resolve_model
    from realizar.config import EngineConfig
    from realizar.models.generated.generate import generated_header
    from realizar.models.parameters import count_parameters

    header = generated_header(key)
    spec, resolved = resolve_model(header, EngineConfig(device=device.kind, max_running=1), device, free)
    if refusal(spec, resolved.chosen.kind) is not None:
        return None
    plan = plan_memory(spec, header, resolved, free)
    fits = [each.context_length for each in plan.contexts if each.num_requests and plan.needed_bytes <= free]
    counts = count_parameters(spec)
    return _Recommended(
        name,
        sum(_stored_bytes(tensor) for tensor in header.tensors.values()),
        plan.needed_bytes,
        counts.total,
        counts.active,
        fits[-1] if fits else 0,
        None if bandwidth is None else bandwidth * 1e9 / (plan.token_weight_bytes or plan.weight_bytes),
    )


def _stored_bytes(tensor: StoredTensor) -> int:
    """By its shape: a header has no data."""
    kind = tensor.ggml_type
    return 0 if kind is None else math.prod(tensor.shape) // kind.block_size * kind.type_size


def _is_recommended(model: _Recommended) -> bool:
    is_fast = model.most_tokens_per_s is None or model.most_tokens_per_s >= _LEAST_TOKENS_PER_S
    return is_fast and model.longest_context >= _SHORTEST_CONTEXT


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
