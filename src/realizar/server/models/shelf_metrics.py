"""Metrics of the models of a server that has several: their states, loads, memory, and requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from realizar.server.metrics import MetricSamples
from realizar.server.models.models import ModelState
from realizar.server.models.shelved import ShelvedModel


def shelf_samples(models: Sequence[ShelvedModel]) -> tuple[MetricSamples, ...]:
    """The samples of all models."""
    states = tuple(
        ("realizar:model_state", {"model_name": model.name, "state": state}, float(model.state == state))
        for model in models
        for state in get_args(ModelState)
    )
    waiting = {model.name: float(len(model.waiters)) for model in models}
    loads = {model.name: float(model.num_loads) for model in models}
    wakes = {model.name: float(model.num_wakes) for model in models}
    memory = {model.name: float(model.held_bytes) for model in models}
    host = {model.name: float(model.held_host_bytes) for model in models}
    return (
        MetricSamples("realizar:model_state", "1 for the state that a model is in.", "gauge", states),
        _by_model(
            "realizar:num_requests_waiting_for_model", "Requests that wait until it is loaded.", "gauge", waiting
        ),
        _by_model("realizar:model_loads", "Times that a model was loaded.", "counter", loads),
        _by_model("realizar:model_wakes", "Times that a model came back from the host's memory.", "counter", wakes),
        _by_model("realizar:model_planned_bytes", "Memory that was planned for its engine.", "gauge", memory),
        _by_model("realizar:model_host_bytes", "Memory of the host that is kept for its weights.", "gauge", host),
    )


def _by_model(name: str, text: str, kind: str, values: dict[str, float]) -> MetricSamples:
    sample = f"{name}_total" if kind == "counter" else name
    return MetricSamples(name, text, kind, tuple((sample, {"model_name": key}, value) for key, value in values.items()))
