"""`ModelFacts`: what lists of models tell of a model's files. They are read without loading the model."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.gguf_names import quantization_of
from realizar.images.prepare import LargestImage, largest_image, with_most_tokens
from realizar.models.parameters import count_parameters
from realizar.models.pooling import default_pooling
from realizar.models.ranking import ranking_tensors
from realizar.models.registry import build_spec
from realizar.models.towers.find import usable_tower
from realizar.request import Pooling
from realizar.tokenizer.templates.abilities import template_abilities
from realizar.tokenizer.templates.chat_template import Compile
from realizar.tokenizer.templates.stored_templates import plain_template

_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model's files.

    Attributes:
        num_parameters: of all tensors; 0 where nothing is known.
        hidden_size, num_layers: dimensions; 0 where nothing is known.
        quantization: as the file's name states it, else the element type that has the most bytes.
        size_bytes: of all tensors. modified_s: Unix time of the last change.
        digest: SHA-256 in hexadecimal of names, sizes and times of the files: another value after any change.
        license: as the file's metadata name it; empty where they do not.
        template: the chat template, or None. tools, reasoning: it has them.
        largest_image: of the images that it reads; None where it reads none.
        fills_in: its vocabulary has marks of a text with a hole; False where it was not read.
        ranks: it is a reranker.
        pooling: the pooling of a model that was made for embeddings, else None.
    """

    format: str = _UNKNOWN
    architecture: str = _UNKNOWN
    num_parameters: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    quantization: str = _UNKNOWN
    size_bytes: int = 0
    modified_s: float = 0.0
    digest: str = hashlib.sha256().hexdigest()
    license: str = ""
    template: str | None = None
    tools: bool = False
    reasoning: bool = False
    largest_image: LargestImage | None = None
    fills_in: bool = False
    ranks: bool = False
    pooling: Pooling | None = None

    @property
    def are_known(self) -> bool:
        """False where no file was read: such facts refuse no request."""
        return self.format != _UNKNOWN


def read_facts(
    checkpoint: Checkpoint,
    chat_template: str | None = None,
    compiler: Compile | None = None,
    config: EngineConfig | None = None,
) -> ModelFacts:
    """Read the facts of a checkpoint; for the other arguments see `ChatTemplate` and `make_served_model`.

    Raises CheckpointError where a file is malformed.
    """
    template = plain_template(checkpoint) if chat_template is None else chat_template
    tools, reasoning = (False, False) if template is None else template_abilities(template, compiler)
    num_parameters, hidden_size, num_layers = _dimensions(checkpoint)
    modified_s, digest = _identity(checkpoint)
    config = config or EngineConfig()
    found, _ = usable_tower(checkpoint, config.mmproj)
    tower = None if found is None else with_most_tokens(found[1], config.image_max_tokens)
    return ModelFacts(
        format=checkpoint.format,
        architecture=checkpoint.architecture,
        num_parameters=num_parameters,
        hidden_size=hidden_size,
        num_layers=num_layers,
        quantization=_quantization(checkpoint),
        size_bytes=checkpoint.size_bytes,
        modified_s=modified_s,
        digest=digest,
        license=_license(checkpoint),
        template=template,
        tools=tools,
        reasoning=reasoning,
        largest_image=None if tower is None else largest_image(tower),
        ranks=bool(ranking_tensors(checkpoint)),
        pooling=default_pooling(checkpoint),
    )


def capabilities(facts: ModelFacts, embeddings: Pooling | None) -> list[str]:
    """What a model does, in Ollama's words; `embeddings` is the pooling that the operator set for all models."""
    generates = facts.pooling is None and not facts.ranks
    there = {
        "completion": generates,
        "tools": generates and facts.tools,
        "vision": generates and facts.largest_image is not None,
        "thinking": generates and facts.reasoning,
        "insert": generates and facts.fills_in,
        "embedding": facts.pooling is not None or embeddings is not None,
    }
    return [name for name, holds in there.items() if holds]


def _dimensions(checkpoint: Checkpoint) -> tuple[int, int, int]:
    try:
        spec = build_spec(checkpoint)
    except (CheckpointError, UnsupportedModelError):
        return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()), 0, 0
    return count_parameters(spec).total, spec.hidden_size, len(spec.layers)


def _quantization(checkpoint: Checkpoint) -> str:
    if checkpoint.format == "gguf" and (named := quantization_of(checkpoint.path.name)):
        return named
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.type_name] += tensor.size_bytes
    return sizes.most_common(1)[0][0] if sizes else _UNKNOWN


def _license(checkpoint: Checkpoint) -> str:
    found = checkpoint.metadata.get("general.license")
    return found if isinstance(found, str) else ""


def _identity(checkpoint: Checkpoint) -> tuple[float, str]:
    found = [(path, path.stat()) for path in sorted({tensor.path for tensor in checkpoint.tensors.values()})]
    text = "\n".join(f"{path.name} {stat.st_size} {stat.st_mtime_ns}" for path, stat in found)
    return max((stat.st_mtime for _, stat in found), default=0.0), hashlib.sha256(text.encode()).hexdigest()
