"""`realizar inspect` shows the contents of a model file, and whether the model can run here.

`realizar show` describes a model to whoever wants to use it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.options.arguments import Json, Model
from realizar.cli.options.chat_template import NO_CHAT
from realizar.cli.terminal.printable import json_line, printable, shown_answer
from realizar.cli.terminal.progress import download_progress
from realizar.errors import ChatTemplateError, InvalidRequestError
from realizar.sizes import format_bytes, format_count
from realizar.tokenizer.templates.stored_templates import plain_template

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.models.parameters import ParameterCounts


_SHOWN_ITEMS = 6
_SHOWN_CHARACTERS = 120

_LICENSE_CHARACTERS = 200
_MANY_TYPES = 3


def inspect_model(model: Model, /, *, as_json: Json = False) -> None:
    """Show a model's metadata, tensors, sizes and chat template, and whether it will run."""
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve

    with download_progress() as progress:
        path = resolve(model, progress)
    checkpoint = open_checkpoint(path)
    reason = why_not_runnable(checkpoint)
    if as_json:
        print(json_line(_record(checkpoint, reason)))
    else:
        print("\n".join(_report(checkpoint, reason)))


def why_not_runnable(checkpoint: Checkpoint) -> str | None:
    """The reason why `run` would refuse a well-formed checkpoint; None if it will run.

    It raises CheckpointError if a tensor is missing or has a wrong shape, or a parameter is absurd.
    """
    from realizar.backends.select import refusals
    from realizar.errors import TokenizerError, UnsupportedModelError
    from realizar.models.check_tensors import check_tensors
    from realizar.models.registry import build_spec
    from realizar.tokenizer.load import load_tokenizer

    reasons = []
    if not checkpoint.tensors:
        reasons.append("it has no weights")
    else:
        try:
            spec = build_spec(checkpoint, None)
            check_tensors(spec, checkpoint)
            reasons += refusals(spec)
        except UnsupportedModelError as error:
            reasons.append(str(error))
    try:
        load_tokenizer(checkpoint)
    except (TokenizerError, UnsupportedModelError) as error:
        reasons.append(str(error))
    return "; ".join(reasons) or None


@dataclass(frozen=True, slots=True)
class KnownWeights:
    """A model's numbers of parameters, and the bytes of weights that a token reads, as stored.

    `gpu_reason` says why no GPU runs it; None if one may.
    """

    parameters: ParameterCounts
    token_bytes: int
    gpu_reason: str | None


def known_weights(checkpoint: Checkpoint) -> KnownWeights | None:
    """None where nothing is known of the model."""
    from realizar.backends.select import refusal_of_gpus
    from realizar.backends.weight_tensors import WeightTensors
    from realizar.errors import CheckpointError, UnsupportedModelError
    from realizar.models.check_tensors import check_tensors
    from realizar.models.parameters import count_parameters, size_of_token
    from realizar.models.registry import build_spec

    try:
        spec = build_spec(checkpoint, None)
        check_tensors(spec, checkpoint)
        tensors = WeightTensors(spec, checkpoint)
        sizes = {matrix.weight: tensors.size_bytes(matrix.weight) for matrix in spec.matrices()}
    except (CheckpointError, UnsupportedModelError):
        return None
    return KnownWeights(count_parameters(spec), size_of_token(spec, sizes), refusal_of_gpus(spec))


def parameters_text(counts: ParameterCounts) -> str:
    """The number of parameters, and beside it that of those that a token goes through."""
    if counts.active == counts.total:
        return format_count(counts.total)
    return f"{format_count(counts.total)}, {format_count(counts.active)} of them for a token"


def file_bytes(checkpoint: Checkpoint) -> int:
    """The size of all files of the model, as `realizar list` and hubs count it."""
    if checkpoint.path.is_dir():
        files = {path for path in checkpoint.path.iterdir() if path.is_file()}
    else:
        files = {checkpoint.path, *(tensor.path for tensor in checkpoint.tensors.values())}
    return sum(file.stat().st_size for file in files)


def element_types(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """The number of tensors and their bytes for each element type, largest first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.type_name] += 1
        sizes[tensor.type_name] += tensor.size_bytes
    return {name: {"tensors": counts[name], "size_bytes": size} for name, size in sizes.most_common()}


def _record(checkpoint: Checkpoint, reason: str | None) -> dict[str, Any]:
    weights = known_weights(checkpoint)
    tensors = [
        {
            "name": tensor.name,
            "type": tensor.type_name,
            "shape": list(tensor.shape),
            "size_bytes": tensor.size_bytes,
            "file": str(tensor.path),
            "offset": tensor.offset,
        }
        for tensor in checkpoint.tensors.values()
    ]
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": checkpoint.architecture,
        "size_bytes": file_bytes(checkpoint),
        "tensor_bytes": checkpoint.size_bytes,
        "parameters": None if weights is None else asdict(weights.parameters),
        "token_bytes": None if weights is None else weights.token_bytes,
        "runs": reason is None,
        "reason": reason,
        "gpu_reason": None if weights is None else weights.gpu_reason,
        "types": element_types(checkpoint),
        "metadata": _jsonable(dict(checkpoint.metadata)),
        "tensors": tensors,
        "chat_template": plain_template(checkpoint),
    }


def _jsonable(value: Any) -> Any:
    """Convert a value for JSON; an array of more than 64 items is replaced by its length."""
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return {"length": len(value)} if len(value) > 64 else [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def runs_text(reason: str | None, weights: KnownWeights | None) -> str:
    if reason is not None:
        return f"no: {printable(reason)}"
    if weights is None or weights.gpu_reason is None:
        return "yes"
    return f"yes, on the CPU alone: {printable(weights.gpu_reason)}"


def _report(checkpoint: Checkpoint, reason: str | None) -> list[str]:
    template, weights = plain_template(checkpoint), known_weights(checkpoint)
    known = []
    if weights is not None:
        read = f"a token reads {format_bytes(weights.token_bytes)} of weights"
        known.append(f"parameters    {parameters_text(weights.parameters)}; {read}")
    lines = [
        f"file          {printable(checkpoint.path)}",
        f"format        {checkpoint.format}",
        f"architecture  {printable(checkpoint.architecture)}",
        f"size          {format_bytes(file_bytes(checkpoint))}, {len(checkpoint.tensors)} tensors",
        *known,
        f"will run      {runs_text(reason, weights)}",
        f"chat          {'yes, with the template below' if template else NO_CHAT}",
        "",
        "metadata",
    ]
    lines += [
        f"  {printable(key)} = {_summary(value)}"
        for key, value in checkpoint.metadata.items()
        if key != "chat_templates"
    ]
    lines += ["", "element types"]
    for name, numbers in element_types(checkpoint).items():
        lines.append(f"  {name:<8} {numbers['tensors']:>5} tensors {format_bytes(numbers['size_bytes']):>10}")
    lines += ["", "tensors (slowest dimension first)"]
    width = max((len(printable(name)) for name in checkpoint.tensors), default=0)
    for tensor in checkpoint.tensors.values():
        shape = " x ".join(map(str, tensor.shape))
        place = f"{tensor.size_bytes:>12} B at {tensor.offset}"
        lines.append(f"  {printable(tensor.name):<{width}}  {tensor.type_name:<8} {shape:<16} {place}")
    if template:
        lines += ["", "chat template", *(f"  {printable(line)}" for line in template.splitlines())]
    return lines


def _summary(value: Any) -> str:
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, str):
        shown = (
            value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}... ({len(value)} characters)"
        )
        return printable(shown)
    if isinstance(value, dict):
        text = json.dumps(_jsonable(value), ensure_ascii=False)
        return _summary(text)
    if hasattr(value, "tolist") or (isinstance(value, Sequence) and not isinstance(value, bytes)):
        items = ", ".join(_summary(item) for item in list(value[:_SHOWN_ITEMS]))
        return f"[{len(value)}] {items}{', ...' if len(value) > _SHOWN_ITEMS else ''}"
    return printable(str(value))


def show_command(
    model: Model,
    /,
    *,
    template: Annotated[bool, Parameter(negative=(), help="Write the chat template alone.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a model is and can do: size, context, chat, tools, reasoning, embeddings, sampling, license."""
    if template and as_json:
        raise InvalidRequestError("--template can't be combined with --json", "template")
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve

    with download_progress() as progress:
        checkpoint = open_checkpoint(resolve(model, progress))
    if template:
        _write_template(model, checkpoint)
        return
    summary = _Summary.of(model, checkpoint)
    print(json_line(summary.record()) if as_json else "\n".join(summary.lines()))


def _write_template(model: str, checkpoint: Checkpoint) -> None:
    text = plain_template(checkpoint)
    if text is None:
        raise ChatTemplateError(f"{model} has no chat template")
    print(shown_answer(text))


@dataclass(frozen=True, slots=True)
class _Summary:
    """Facts of a model to show.

    Attributes:
        context_length: tokens that it was made for; None where the model can't be read.
        types: element types of its tensors, the one with the most bytes first.
        reason: the reason why it can't run; None if it can.
        tools, reasoning: True if its chat template has them.
        pooling: the pooling of a model that was made for embeddings, else None.
        advised: sampling that its files advise, by name; the rest is built in.
        sampling: sampling of requests that set none.
    """

    name: str
    path: str
    architecture: str
    size_bytes: int
    context_length: int | None
    types: tuple[str, ...]
    weights: KnownWeights | None
    reason: str | None
    chat: bool
    tools: bool
    reasoning: bool
    pooling: str | None
    advised: dict[str, float | int]
    sampling: dict[str, float | int]
    license: str | None

    @classmethod
    def of(cls, name: str, checkpoint: Checkpoint) -> _Summary:
        """Read a model's files, but not its weights. It raises CheckpointError if they are malformed."""
        from realizar.models.pooling import default_pooling
        from realizar.sampling_params import BUILT_IN_SAMPLING
        from realizar.tokenizer.generation_defaults import generation_defaults
        from realizar.tokenizer.templates.abilities import template_abilities

        template = plain_template(checkpoint)
        tools, reasoning = (False, False) if template is None else template_abilities(template)
        advised = generation_defaults(checkpoint)
        return cls(
            name=name,
            path=str(checkpoint.path),
            architecture=checkpoint.architecture,
            size_bytes=file_bytes(checkpoint),
            context_length=_context_length(checkpoint),
            types=tuple(element_types(checkpoint)),
            weights=known_weights(checkpoint),
            reason=why_not_runnable(checkpoint),
            chat=template is not None,
            tools=tools,
            reasoning=reasoning,
            pooling=default_pooling(checkpoint),
            advised=advised,
            sampling={**BUILT_IN_SAMPLING, **advised},
            license=_license(checkpoint),
        )

    def record(self) -> dict[str, Any]:
        counts = None if self.weights is None else self.weights.parameters
        return {
            "name": self.name,
            "path": self.path,
            "architecture": self.architecture,
            "parameters": None if counts is None else counts.total,
            "size_bytes": self.size_bytes,
            "types": list(self.types),
            "context_length": self.context_length,
            "runs": self.reason is None,
            "reason": self.reason,
            "chat": self.chat,
            "tools": self.tools,
            "reasoning": self.reasoning,
            "pooling": self.pooling,
            "sampling": self.sampling,
            "advised_sampling": self.advised,
            "license": self.license,
        }

    def lines(self) -> list[str]:
        types = ", ".join(self.types[:_MANY_TYPES]) + (", ..." if len(self.types) > _MANY_TYPES else "")
        size = f"{format_bytes(self.size_bytes)}, {types}" if types else format_bytes(self.size_bytes)
        chat = "no template: `realizar run --raw` completes text"
        if self.chat:
            abilities = (("tools", self.tools), ("reasoning", self.reasoning))
            chat = "yes" + "".join(f", {name}" for name, there in abilities if there)
        values = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        origin = "by the model's files, else built in" if self.advised else "built in, as the files advise nothing"
        rows = {
            "name": self.name,
            "path": self.path,
            "architecture": self.architecture,
            "parameters": "unknown" if self.weights is None else parameters_text(self.weights.parameters),
            "size": size,
            "context": "unknown" if self.context_length is None else f"{self.context_length:,} tokens",
            "runs": runs_text(self.reason, self.weights),
            "chat": chat,
            "embeddings": "not made for them" if self.pooling is None else f"yes, by the pooling {self.pooling}",
            "sampling": f"{values} ({origin})",
            "license": self.license or "not stated in the files",
        }
        width = max(map(len, rows))
        return [f"{name:<{width}}  {printable(value)}" for name, value in rows.items()]


def _context_length(checkpoint: Checkpoint) -> int | None:
    from realizar.errors import CheckpointError, UnsupportedModelError
    from realizar.models.registry import build_spec

    try:
        return build_spec(checkpoint).context_length
    except (CheckpointError, UnsupportedModelError):
        return None


def _license(checkpoint: Checkpoint) -> str | None:
    """The license that a GGUF file names; folders of safetensors name none."""
    name = checkpoint.metadata.get("general.license")
    return name[:_LICENSE_CHARACTERS] if checkpoint.format == "gguf" and isinstance(name, str) and name else None
