"""Lists of models: `/api/tags`, `/api/ps` and `/api/show`; and `/api/version`, by which clients find Ollama."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from realizar import __version__
from realizar.sampling_params import SamplingParams
from realizar.server.errors import refused
from realizar.server.http.body import read_record
from realizar.server.http.request import json_response, settings_of
from realizar.server.model_facts import ModelFacts, capabilities
from realizar.server.models.models import ModelStatus, models_of
from realizar.server.ollama.names import find_model, shown_name
from realizar.server.ollama.records import ShowRequest
from realizar.server.ollama.times import at

OLLAMA_VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients refuse older ones."""
_NEVER = "9999-12-31T23:59:59Z"
_SHOWN_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


async def tags(request: Request) -> Response:
    listed = models_of(request).listed()
    return json_response({"models": [_card(name, status) for status in listed for name in status.names]})


async def running(request: Request) -> Response:
    """List the models that are loaded, and those that sleep: all of such a model is in the host's memory."""
    loaded = [status for status in models_of(request).listed() if status.device is not None]
    return json_response({"models": [_card(status.names[0], status) | _running(status) for status in loaded]})


async def show(request: Request) -> Response:
    """It need not be loaded."""
    record = await read_record(request, ShowRequest)
    for name in ("template", "system", "options"):
        if getattr(record, name):
            raise refused(f"{name} is not supported: a model is shown as it is served", name, "unsupported_parameter")
    name, status = find_model(models_of(request), record.model or record.name or "")
    facts = status.facts
    family = facts.architecture
    return json_response(
        {
            "modelfile": f"# Written by realizar, for a model that it serves\nFROM {shown_name(name)}\n",
            "parameters": _parameters(status.default_sampling, status.max_model_len),
            "template": facts.template or "",
            "license": facts.license,
            "details": _details(facts),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": facts.num_parameters,
                f"{family}.context_length": status.max_model_len,
                f"{family}.embedding_length": facts.hidden_size,
                f"{family}.block_count": facts.num_layers,
            },
            "capabilities": capabilities(facts, settings_of(request).embeddings),
            "modified_at": at(facts.modified_s or status.created_s),
        }
    )


async def version(request: Request) -> Response:
    """Answer with the version of Ollama whose API this is."""
    return json_response({"version": OLLAMA_VERSION, "server": f"realizar {__version__}"})


async def probe(request: Request) -> Response:
    """Answer at `/`, where there is no page, with the text by which some clients find Ollama."""
    return Response("Ollama is running", media_type="text/plain")


def _card(name: str, status: ModelStatus) -> dict[str, Any]:
    facts = status.facts
    return {
        "name": shown_name(name),
        "model": shown_name(name),
        "modified_at": at(facts.modified_s or status.created_s),
        "size": facts.size_bytes,
        "digest": facts.digest,
        "details": _details(facts),
    }


def _running(status: ModelStatus) -> dict[str, Any]:
    is_asleep = status.state == "asleep"
    size = (status.host_bytes if is_asleep else status.num_bytes) or status.facts.size_bytes
    return {
        "size": size,
        "size_vram": 0 if status.device == "cpu" or is_asleep else size,
        "state": status.state,
        "device": status.device_label,
        "expires_at": _NEVER if status.unloads_s is None else at(status.unloads_s),
        "context_length": status.max_model_len,
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": facts.format,
        "family": facts.architecture,
        "families": [facts.architecture, *(["clip"] if facts.largest_image is not None else [])],
        "parameter_size": _short_count(facts.num_parameters),
        "quantization_level": facts.quantization,
    }


def _short_count(count: int) -> str:
    """A number of parameters as Ollama writes it: `134.52M`, `30.5B`."""
    if count >= 10**9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count >= 10**6 else str(count)


def _parameters(sampling: SamplingParams, max_model_len: int) -> str:
    """Defaults of a request, a line each; clients take the length of the context from `num_ctx`."""
    values = {theirs: getattr(sampling, ours) for ours, theirs in _SHOWN_PARAMETERS.items()}
    return "\n".join(f"{name:<30} {value}" for name, value in {**values, "num_ctx": max_model_len}.items())
