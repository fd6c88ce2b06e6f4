"""Options of an application, what a replica takes of its host, and what is said where Ray is not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import yaml

from realizar.config import EngineConfig
from realizar.engine.planned_load import PlannedLoad
from realizar.errors import InvalidRequestError, RealizarError
from realizar.ray import RayOptions, application, build_app
from realizar.ray.options import Placement, placement_of

GIB = 1 << 30


def test_a_configuration_file_gives_options() -> None:
    options = RayOptions.read(
        {"names": ["one"], "max_replicas": 3, "target_requests": 8, "config": {"threads": 2}, "settings": {}}
    )
    assert (options.names, options.max_replicas, options.target_requests) == (("one",), 3, 8)
    assert options.config == EngineConfig(threads=2)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"replicas": 3}, "args has no replicas; it takes model, names"),
        ({"max_replicas": "many"}, r"args: Expected `int`, got `str` - at `\$.max_replicas`"),
        ({"max_replicas": 0}, "max_replicas must be at least 1, not 0"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2, below min_replicas 3"),
        ({"target_requests": 0.0}, "target_requests must be above 0"),
        ({"fronts": 2, "settings": {"max_stored_responses": 5}}, "responses can't be kept by 2 fronts"),
        ({"config": {"threads": 0}}, "threads must be between 1 and 1024"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, object], error: str) -> None:
    with pytest.raises(RealizarError, match=error):
        RayOptions.read(fields)


def test_the_file_for_kubernetes_names_options_that_are_there() -> None:
    text = (Path(__file__).parents[2] / "deploy" / "kuberay.yaml").read_text()
    (application_,) = yaml.safe_load(yaml.safe_load(text)["spec"]["serveConfigV2"])["applications"]
    module, name = application_["import_path"].split(":")
    assert getattr(importlib.import_module(module), name) is application
    fields = dict(application_["args"])
    assert fields.pop("model") == "smollm2:135m"
    assert RayOptions.read(fields).max_replicas == 4


def test_a_configuration_file_needs_a_model() -> None:
    with pytest.raises(RealizarError, match="args needs a model"):
        application({"max_replicas": 2})


def test_without_ray_the_way_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RealizarError, match=r"Ray Serve is not installed .*\[ray\]"):
        build_app("smollm2:135m")


def test_a_replica_on_a_cpu_has_a_processor_for_each_thread_and_the_planned_memory() -> None:
    placement = placement_of(PlannedLoad(EngineConfig(), 2 * GIB, "cpu", 64, 8), threads=6)
    assert (placement.cpus, placement.gpus) == (6.0, 0)
    assert 2 * GIB < placement.memory_bytes < 3 * GIB


def test_a_replica_on_a_gpu_has_one_and_memory_of_its_host() -> None:
    placement = placement_of(PlannedLoad(EngineConfig(), 40 * GIB, "cuda:1", 64, 8, host_bytes=16 * GIB), threads=6)
    assert placement == Placement(1.0, 1, placement.memory_bytes)
    assert 16 * GIB < placement.memory_bytes < 17 * GIB
    assert placement.actor_options() == {"num_cpus": 1.0, "num_gpus": 1, "memory": placement.memory_bytes}


def test_invalid_values_are_errors_of_the_request() -> None:
    with pytest.raises(InvalidRequestError):
        RayOptions(fronts=0)
