"""`realizar show` describes a model to whoever wants to use it. `realizar inspect` lists the contents of its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.commands.inspect import (
    element_types,
    file_bytes,
    known_weights,
    parameters_text,
    runs_text,
    why_not_runnable,
)
from realizar.cli.options.arguments import Json, Model
from realizar.cli.terminal.printable import json_line, printable, shown_answer
from realizar.cli.terminal.progress import download_progress
from realizar.errors import ChatTemplateError, InvalidRequestError
from realizar.sizes import format_bytes
from realizar.tokenizer.templates.stored_templates import plain_template

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.cli.commands.inspect import KnownWeights

_LICENSE_CHARACTERS = 200
_MANY_TYPES = 3


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
