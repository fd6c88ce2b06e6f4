"""`realizar doctor` reports the machine's hardware and software, and checks that the engine works on it."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from realizar import __version__
from realizar.cli.options.arguments import Json, MaybeInteger, Verbose
from realizar.cli.options.serve import check_replicas
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import printable
from realizar.errors import RealizarError
from realizar.sizes import format_bytes

_PACKAGES = ("numpy", "numba", "llvmlite", "tokenizers", "jinja2", "safetensors", "huggingface_hub", "pip")
_GPU_PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")


_Replicas = Annotated[
    MaybeInteger,
    Parameter(help="Replicas of `serve --replicas` to show the places of; default one for each GPU, or side."),
]


class DoctorError(RealizarError):
    """A check failed."""


def doctor_command(*, replicas: _Replicas = None, verbose: Verbose = False, as_json: Json = False) -> None:
    """Report processor, instruction sets, GPUs, memory and caches, and check that the engine works on each device.

    Exit status 1 if a check fails.
    """
    show_log(verbose)
    from realizar.backends.cpu.kernel_cache import cache_folder
    from realizar.hub.cache import models_dir

    if replicas is not None:
        check_replicas(replicas)
    facts = _facts(replicas)
    checks = [
        _check("the model cache can be written", lambda: _write(models_dir())),
        _check("the kernel cache can be written", lambda: _write(cache_folder())),
        _check("a random model runs", partial(_run_random_model, "cpu")),
    ]
    for device in [gpu["device"] for gpu in facts["gpus"] if gpu["fault"] is None]:
        checks.append(_check(f"{device} computes what the CPU does", partial(_compare_with_cpu, device)))
        checks.append(_check(f"a random model runs on {device}", partial(_run_random_model, device)))
    if as_json:
        print(json.dumps({**facts, "checks": checks}))
    else:
        print("\n".join(map(printable, _report(facts, checks))))
    failed = [check["name"] for check in checks if not check["ok"]]
    if failed:
        raise DoctorError(f"these checks failed: {', '.join(failed)}")


def _facts(replicas: int | None) -> dict[str, Any]:
    from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS, host_features, select, supported
    from realizar.backends.cpu.kernel_cache import cache_folder
    from realizar.backends.device_choice import gpu_facts
    from realizar.backends.machine import read_machine
    from realizar.hub.cache import folder_bytes, models_dir

    machine, features = read_machine(), host_features()
    gpus, no_gpu = gpu_facts()
    return {
        "realizar": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "processor": machine.processor,
        "physical_cores": machine.physical_cores,
        "logical_cores": machine.logical_cores,
        **_sides(gpus, replicas),
        "cache_bytes": machine.cache_bytes,
        "memory_bytes": machine.memory_bytes,
        "available_bytes": machine.available_bytes,
        "gpu_packages": {name: _version(name) for name in _GPU_PACKAGES},
        "gpus": gpus,
        "no_gpu": no_gpu,
        "instruction_set": select().name,
        "instruction_sets": {known.name: supported(known, features) for known in INSTRUCTION_SETS},
        "model_cache": {"path": str(models_dir()), "size_bytes": folder_bytes(models_dir())},
        "kernel_cache": {"path": str(cache_folder()), "size_bytes": folder_bytes(cache_folder())},
    }


def _sides(gpus: list[dict[str, Any]], replicas: int | None) -> dict[str, Any]:
    """The sides of the machine, and the places that replicas would get: on its GPUs if there are several."""
    from realizar.backends.machine import allowed_cpus
    from realizar.replicas.places import cpu_list, places_on_cores, places_on_gpus, read_cores
    from realizar.replicas.planning import usable_gpus

    cores, usable = read_cores(allowed_cpus()), usable_gpus(gpus)
    nodes = sorted({core.node for core in cores})
    count = replicas or max(len(usable), len(nodes), 2)
    on_gpus = 0 < count <= len(usable)
    places = places_on_gpus(usable, cores, count) if on_gpus else places_on_cores(cores, count)
    return {
        "sockets": len({core.socket for core in cores}),
        "nodes": {
            str(node): cpu_list(sorted(cpu for core in cores if core.node == node for cpu in core.cpus))
            for node in nodes
        },
        "replicas": [place.label for place in places],
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check(name: str, work: Callable[[], None]) -> dict[str, Any]:
    start_s = time.perf_counter()
    try:
        work()
        problem = None
    except Exception as error:  # noqa: BLE001
        problem = f"{type(error).__name__}: {error}"
    return {"name": name, "ok": problem is None, "seconds": time.perf_counter() - start_s, "problem": problem}


def _write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(os.urandom(16))


def _run_random_model(device: str) -> None:
    """Run prefill and decode of a tiny model, so that every kind of kernel is compiled and run."""
    from realizar.bench.throughput import Work, measure_throughput
    from realizar.checkpoint.open import open_checkpoint
    from realizar.config import EngineConfig
    from realizar.models.generated.generate import generate_gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        generate_gguf("tiny", path, "q4_k_m")
        work = Work(prompt_tokens=32, gen_tokens=4, batches=(1, 2), repeats=1)
        measure_throughput(open_checkpoint(path), EngineConfig(device=device), work, log=lambda _text: None)


def _compare_with_cpu(device: str) -> None:
    from realizar.backends.device_choice import choose_device
    from realizar.backends.select import compare_with_cpu

    difference = compare_with_cpu(choose_device(device))
    if difference is not None:
        raise DoctorError(difference)


def _gpu_lines(facts: dict[str, Any], packages: str) -> list[str]:
    lines = [f"GPU packages     {packages}"]
    for gpu in facts["gpus"]:
        line = f"{gpu['device']:<16} {gpu['name']}, compute capability {gpu['compute_capability']}"
        if gpu["fault"] is None:
            lines.append(f"{line}, {format_bytes(gpu['free_bytes'])} free of {format_bytes(gpu['memory_bytes'])}")
        else:
            lines.append(f"{line}, not used: {gpu['fault']}")
    if not facts["gpus"]:
        lines.append(f"GPU              none{': ' + facts['no_gpu'] if facts['no_gpu'] else ''}")
    return lines


def _report(facts: dict[str, Any], checks: list[dict[str, Any]]) -> list[str]:
    caches = ", ".join(f"{name} {size >> 10} KB" for name, size in facts["cache_bytes"].items())
    sets = ", ".join(name for name, there in facts["instruction_sets"].items() if there)
    packages, for_gpus = (
        ", ".join(f"{name} {number or 'missing'}" for name, number in facts[key].items())
        for key in ("packages", "gpu_packages")
    )
    nodes = ", ".join(f"CPUs {cpus} on node {node}" for node, cpus in facts["nodes"].items())
    lines = [
        f"realizar         {facts['realizar']}, Python {facts['python']}, {facts['system']}",
        f"packages         {packages}",
        f"processor        {facts['processor']}",
        f"cores            {facts['physical_cores']} physical, {facts['logical_cores']} logical",
        f"sides            {facts['sockets']} sockets; {nodes}",
        f"caches           {caches or 'unknown'}",
        f"memory           {format_bytes(facts['available_bytes'])} free of {format_bytes(facts['memory_bytes'])}",
        f"instruction set  {facts['instruction_set']} (this processor has: {sets})",
        *_gpu_lines(facts, for_gpus),
        *(f"replica {number:<8} {label}" for number, label in enumerate(facts["replicas"])),
        f"models           {facts['model_cache']['path']} ({format_bytes(facts['model_cache']['size_bytes'])})",
        f"kernels          {facts['kernel_cache']['path']} ({format_bytes(facts['kernel_cache']['size_bytes'])})",
        "",
    ]
    for check in checks:
        result = f"ok ({check['seconds']:.1f} s)" if check["ok"] else f"FAILED: {check['problem']}"
        lines.append(f"{check['name']:<36} {result}")
    return lines
