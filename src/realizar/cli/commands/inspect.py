"""`realizar inspect` shows the contents of a model file, and whether the model can run here.

`realizar show` describes a model to whoever wants to use it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.options.arguments import Json, Model
from realizar.cli.options.chat_template import NO_CHAT
from realizar.cli.options.loading import fetch_model
from realizar.cli.terminal.printable import json_line, printable, shown_answer
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

    checkpoint = fetch_model(model)
    reason = why_not_runnable(checkpoint)
    if as_json:
        print(json_line(_record(checkpoint, reason)))
    else:
        print("\n".join(_report(checkpoint, reason)))


def why_not_runnable(checkpoint: Checkpoint) -> str | None:
    """The reason why `run` would refuse a well-formed checkpoint; None if it will run.

    It raises CheckpointError if a tensor is missing or has a wrong shape, or a parameter is absurd.
    """
    from realizar.backends.select import refusal
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
            on_cpu, on_gpu = refusal(spec, "cpu"), refusal(spec, "cuda")
            reasons += [on_cpu, on_gpu] if on_cpu is not None and on_gpu is not None else []
        except UnsupportedModelError as error:
            reasons.append(str(error))
    try:
        load_tokenizer(checkpoint)
    except (TokenizerError, UnsupportedModelError) as error:
        reasons.append(str(error))
    return "; ".join(reasons) or None


@dataclass(frozen=True, slots=True)
class KnownWeights:
    """A model's numbers of parameters, and the bytes of weights that a token reads, by the sizes of layouts' blocks.

    `layouts` are those of its matrices, with the number of each; `method` is that of a safetensors folder's quantised
    ones, None where all are plain. `gpu_reason` says why no GPU runs it; None if one may. `fp8_activations`: the method
    asks for activations in FP8; `cache_scheme`: what it says of keys and values, None for nothing.
    """

    parameters: ParameterCounts
    token_bytes: int
    layouts: dict[str, int]
    method: str | None
    gpu_reason: str | None
    fp8_activations: bool
    cache_scheme: str | None


def known_weights(checkpoint: Checkpoint) -> KnownWeights | None:
    """None where nothing is known of the model."""
    from realizar.backends.select import refusal
    from realizar.backends.weight_tensors import WeightTensors
    from realizar.errors import CheckpointError, UnsupportedModelError
    from realizar.models.check_tensors import check_tensors
    from realizar.models.parameters import count_parameters, size_of_token
    from realizar.models.registry import build_spec
    from realizar.quantization.tensors import matrix_format

    try:
        spec = build_spec(checkpoint, None)
        check_tensors(spec, checkpoint)
        tensors = WeightTensors(spec, checkpoint)
        sizes = {matrix.weight: tensors.size_bytes(matrix.weight) for matrix in spec.matrices()}
        names = {matrix.weight: tensors.layout(matrix.weight).name for matrix in spec.matrices()}
        for linear in spec.linears():
            if (ordered := tensors.ordered(linear)) is not None:
                sizes[linear.weight] = ordered[0].size_bytes
                names[linear.weight] = f"{ordered[0].layout.name} in act-order (on GPUs 16 bits)"
        layouts = Counter(names.values())
        stored = matrix_format(checkpoint)
    except (CheckpointError, UnsupportedModelError):
        return None
    method = None if stored is None else str(stored.config["quant_method"])
    size = size_of_token(spec, sizes)
    in_fp8, scheme = (False, None) if stored is None else (stored.fp8_activations, stored.cache_scheme)
    return KnownWeights(
        count_parameters(spec), size, dict(layouts.most_common()), method, refusal(spec, "cuda"), in_fp8, scheme
    )


def has_block(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint has a next-token block that a backend runs."""
    from realizar.backends.select import refusal
    from realizar.errors import CheckpointError, UnsupportedModelError
    from realizar.models.check_tensors import check_tensors
    from realizar.models.registry import build_next_token_block

    try:
        block = build_next_token_block(checkpoint)
        if block is not None:
            check_tensors(block, checkpoint)
    except (CheckpointError, UnsupportedModelError):
        return False
    return block is not None and refusal(block, "cpu") is None


def drafter_file(checkpoint: Checkpoint) -> Path | None:
    """What drafts with `--drafter auto`: the model's own file, or one beside it; None where the text alone does."""
    from realizar.config import EngineConfig
    from realizar.engine.draft_models import resolve_drafted
    from realizar.errors import RealizarError

    if has_block(checkpoint):
        return checkpoint.path
    try:
        others = resolve_drafted(checkpoint, EngineConfig(device="cpu", drafter="auto")).others
    except RealizarError:  # of a model that does not run
        return None
    return others["drafter"].checkpoint.path if others else None


def drafter_text(checkpoint: Checkpoint) -> str | None:
    """`drafter_file` for people."""
    path = drafter_file(checkpoint)
    if path is None:
        return None
    return "its own next-token block" if path == checkpoint.path else f"{printable(path.name)}, which lies beside it"


@dataclass(frozen=True, slots=True)
class Sight:
    """Whether a model reads images: `encoder` is llama.cpp's name of what encodes them, and `file` has it.

    Both are None where it reads none; `reason` says why an encoder that is there does not run, else it is None.
    `weight_bytes` are those of its matrices, as they are stored.
    """

    encoder: str | None = None
    file: str | None = None
    reason: str | None = None
    weight_bytes: int = 0

    def text(self) -> str:
        if self.encoder is not None:
            size = format_bytes(self.weight_bytes)
            return f"yes, encoded by {self.encoder} of {printable(self.file)}, {size} of weights"
        return "no" if self.reason is None else f"no: {printable(self.reason)}"


def sight_of(checkpoint: Checkpoint) -> Sight:
    from realizar.backends.weight_tensors import WeightTensors
    from realizar.models.towers.find import usable_tower

    found, reason = usable_tower(checkpoint)
    if found is None:
        return Sight(reason=reason)
    holder, tower = found
    tensors = WeightTensors(tower, holder)
    size = sum(tensors.size_bytes(matrix.weight) for matrix in tower.matrices())
    return Sight(tower.architecture, str(holder.path), weight_bytes=size)


def cache_text(scheme: str, kv_dtype: str = "auto") -> str:
    """What becomes of a checkpoint's scheme for keys and values in a cache of a type."""
    if scheme != "FP8":
        return f"made for {printable(scheme)}, which is not read: they are kept as --kv-cache-dtype says"
    return f"made for FP8, {'as they are kept' if kv_dtype == 'fp8' else 'which --kv-cache-dtype fp8 keeps them in'}"


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
        "quantised_by": None if weights is None else weights.method,
        "layouts": None if weights is None else weights.layouts,
        "cache_scheme": None if weights is None else weights.cache_scheme,
        "next_token_block": has_block(checkpoint),
        "drafter": None if (drafter := drafter_file(checkpoint)) is None else str(drafter),
        "images": asdict(sight_of(checkpoint)),
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
        if weights.method is not None:
            held = ", ".join(f"{count} of {name}" for name, count in weights.layouts.items())
            inputs = "; activations in FP8 on GPUs of 9.0" if weights.fp8_activations else ""
            known.append(f"quantised     by {printable(weights.method)}: matrices {held}{inputs}")
        if weights.cache_scheme is not None:
            known.append(f"keys, values  {cache_text(weights.cache_scheme)}")
    lines = [
        f"file          {printable(checkpoint.path)}",
        f"format        {checkpoint.format}",
        f"architecture  {printable(checkpoint.architecture)}",
        f"size          {format_bytes(file_bytes(checkpoint))}, {len(checkpoint.tensors)} tensors",
        *known,
        f"will run      {runs_text(reason, weights)}",
        *(
            []
            if (drafter := drafter_text(checkpoint)) is None
            else [f"drafts        by {drafter}, with --drafter auto"]
        ),
        f"chat          {'yes, with the template below' if template else NO_CHAT}",
        f"images        {sight_of(checkpoint).text()}",
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
    """Show what a model is and can do: size, context, chat, tools, reasoning, images, embeddings, sampling, license."""
    if template and as_json:
        raise InvalidRequestError("--template can't be combined with --json", "template")

    checkpoint = fetch_model(model)
    if template:
        text = plain_template(checkpoint)
        if text is None:
            raise ChatTemplateError(f"{model} has no chat template")
        print(shown_answer(text))
        return
    weights = known_weights(checkpoint)
    sight = sight_of(checkpoint)
    facts = _facts(model, checkpoint, weights) | {"images": asdict(sight)}
    print(json_line(facts) if as_json else "\n".join(_described(facts, weights, sight)))


def _facts(name: str, checkpoint: Checkpoint, weights: KnownWeights | None) -> dict[str, Any]:
    """Facts of a model, as JSON has them; its weights are not read. CheckpointError: its files are malformed.

    `context_length` is None where the model can't be read, `pooling` where it was not made for embeddings, and
    `advised_sampling` has what the files advise; the rest of the sampling of requests that set none is built in.
    """
    from realizar.models.pooling import default_pooling
    from realizar.sampling_params import BUILT_IN_SAMPLING
    from realizar.tokenizer.generation_defaults import generation_defaults
    from realizar.tokenizer.templates.abilities import template_abilities

    template, reason = plain_template(checkpoint), why_not_runnable(checkpoint)
    tools, reasoning = (False, False) if template is None else template_abilities(template)
    advised = generation_defaults(checkpoint)
    return {
        "name": name,
        "path": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "parameters": None if weights is None else weights.parameters.total,
        "size_bytes": file_bytes(checkpoint),
        "types": list(element_types(checkpoint)),
        "context_length": _context_length(checkpoint),
        "runs": reason is None,
        "reason": reason,
        "chat": template is not None,
        "tools": tools,
        "reasoning": reasoning,
        "pooling": default_pooling(checkpoint),
        "sampling": {**BUILT_IN_SAMPLING, **advised},
        "advised_sampling": advised,
        "license": _license(checkpoint),
    }


def _described(facts: dict[str, Any], weights: KnownWeights | None, sight: Sight) -> list[str]:
    """Facts for people."""
    types = ", ".join(facts["types"][:_MANY_TYPES]) + (", ..." if len(facts["types"]) > _MANY_TYPES else "")
    size = format_bytes(facts["size_bytes"])
    chat = "no template: `realizar run --raw` completes text"
    if facts["chat"]:
        chat = "yes" + "".join(f", {name}" for name in ("tools", "reasoning") if facts[name])
    values = ", ".join(f"{name} {value:g}" for name, value in facts["sampling"].items())
    origin = (
        "by the model's files, else built in" if facts["advised_sampling"] else "built in, as the files advise nothing"
    )
    context, pooling = facts["context_length"], facts["pooling"]
    rows = {
        **{name: facts[name] for name in ("name", "path", "architecture")},
        "parameters": "unknown" if weights is None else parameters_text(weights.parameters),
        "size": f"{size}, {types}" if types else size,
        "context": "unknown" if context is None else f"{context:,} tokens",
        "runs": runs_text(facts["reason"], weights),
        "chat": chat,
        "images": sight.text(),
        "embeddings": "not made for them" if pooling is None else f"yes, by the pooling {pooling}",
        "sampling": f"{values} ({origin})",
        "license": facts["license"] or "not stated in the files",
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
