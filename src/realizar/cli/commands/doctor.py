"""`realizar doctor` reports the machine's hardware and software, and checks that the engine works on it.

With a model it checks that too: its files, its chat template, its memory, and what it makes of a text on each device.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar import __version__
from realizar.cli.commands.inspect import drafter_text, file_bytes, known_weights
from realizar.cli.commands.plan import check_fits
from realizar.cli.commands.score import summary
from realizar.cli.options.arguments import Integer, Json, MaybeInteger, MaybeSize, Verbose, complete_model
from realizar.cli.options.loading import fetch_model
from realizar.cli.options.serve import check_replicas
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import printable
from realizar.errors import RealizarError
from realizar.sizes import format_bytes
from realizar.tokenizer.templates.stored_templates import plain_template

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint

_LEAST_FREE = 1 << 30
_LOCK_S = 1.0
_PACKAGES = ("numpy", "numba", "llvmlite", "tokenizers", "jinja2", "safetensors", "huggingface_hub", "pip")
_GPU_PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")


_Replicas = Annotated[
    MaybeInteger,
    Parameter(help="Replicas of `serve --replicas` to show the places of; default one for each GPU, or side."),
]


class DoctorError(RealizarError):
    """A check failed."""


def doctor_command(
    model: Annotated[str | None, Parameter(help="A model to check too.", completer=complete_model)] = None,
    /,
    *,
    memory: Annotated[
        MaybeSize, Parameter(help="Free memory, such as 32G, into which the model is to fit; default what is free.")
    ] = None,
    port: Annotated[Integer, Parameter(help="The port that a server would listen on.")] = 8000,
    replicas: _Replicas = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Report processor, instruction sets, GPUs, memory and caches, and check that the engine works on each device.

    With MODEL it is fetched if needed, and checked: its files, its chat template, its memory, the perplexity and the
    speed that it has on each device. Exit status 1 if a check fails.
    """
    show_log(verbose)
    if replicas is not None:
        check_replicas(replicas)
    try:
        import realizar.backends.cpu.kernel_cache  # noqa: F401
    except (ImportError, OSError) as error:
        raise DoctorError(f"the compiler of the CPU's kernels, Numba, can't be imported: {error}") from error
    facts = _facts(replicas)
    devices = [gpu["device"] for gpu in facts["gpus"] if gpu["fault"] is None]
    checks = _machine_checks(devices)
    if model is not None:
        model_facts, model_checks = _check_model(model, ["cpu", *devices], memory)
        facts["model"] = model_facts
        checks += [*_serving_checks(facts, port), *model_checks]
    if as_json:
        print(json.dumps({**facts, "checks": checks}))
    else:
        print("\n".join(map(printable, _report(facts, checks))))
    failed = [check["name"] for check in checks if not check["ok"]]
    if failed:
        raise DoctorError(f"these checks failed: {', '.join(failed)}")


def _machine_checks(devices: list[str]) -> list[dict[str, Any]]:
    from realizar.backends.cpu.kernel_cache import cache_folder
    from realizar.hub.cache import models_dir

    checks = [
        _check("the model cache can be written", lambda: _write(models_dir())),
        _check("the kernel cache can be written", lambda: _write(cache_folder())),
        _check("a random model runs", partial(_run_random_model, "cpu")),
    ]
    for device in devices:
        checks.append(_check(f"{device} computes what the CPU does", partial(_compare_with_cpu, device)))
        checks.append(_check(f"a random model runs on {device}", partial(_run_random_model, device)))
    return checks


def _serving_checks(facts: dict[str, Any], port: int) -> list[dict[str, Any]]:
    """Of what a model needs to be served well, and the engine can do without."""
    from realizar.hub.cache import models_dir

    return [
        _check("nobody holds the model cache", lambda: _try_locks(models_dir())),
        _check(f"port {port} is free", lambda: _try_port(port)),
        _check("kernels use vector instructions", lambda: _check_instructions(facts["instruction_set"])),
        *(
            [_check("a GPU that is listed is used", lambda: _check_gpus(facts))]
            if facts["gpus"] or facts["no_gpu"]
            else ()
        ),
    ]


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
    from realizar.replicas.places import cpu_list, gpu_groups, places_on_cores, places_on_gpus, read_cores
    from realizar.replicas.planning import usable_gpus

    cores, usable = read_cores(allowed_cpus()), usable_gpus(gpus)
    nodes = sorted({core.node for core in cores})
    count = replicas or max(len(usable), len(nodes), 2)
    on_gpus = 0 < count <= len(usable)
    places = places_on_gpus(gpu_groups(usable, 1, count), cores) if on_gpus else places_on_cores(cores, count)
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


def _check(name: str, work: Callable[[], object]) -> dict[str, Any]:
    start_s = time.perf_counter()
    try:
        work()
        problem = None
    except DoctorError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001
        problem = f"{type(error).__name__}: {error}"
    return {"name": name, "ok": problem is None, "seconds": time.perf_counter() - start_s, "problem": problem}


def _write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(os.urandom(16))
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE:
        raise DoctorError(f"its disk is full but for {format_bytes(free)}")


def _try_locks(folder: Path) -> None:
    from filelock import FileLock, Timeout

    for path in sorted(folder.glob("*.lock")):
        try:
            with FileLock(path, timeout=_LOCK_S):
                pass
        except Timeout:
            raise DoctorError(
                f"{path.name} is locked by another process: it fetches the model, or hangs, and others wait for it"
            ) from None


def _try_port(port: int) -> None:
    from realizar.cli.server_records import running_servers, servers_folder

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return
        except OSError as error:
            reason = error.strerror or str(error)
    own = next((each for each in running_servers(servers_folder()) if each.url.endswith(f":{port}")), None)
    whose = f"your server of {', '.join(own.models)}" if own else "another program"
    raise DoctorError(f"{whose} has it: {reason}")


def _check_instructions(used: str) -> None:
    if used == "portable" and platform.machine() in ("x86_64", "AMD64"):
        raise DoctorError("this processor has no AVX2: kernels are the portable ones, which are several times slower")


def _check_gpus(facts: dict[str, Any]) -> None:
    faults = [f"{gpu['device']}, {gpu['name']}: {gpu['fault']}" for gpu in facts["gpus"] if gpu["fault"] is not None]
    if faults or facts["no_gpu"]:
        raise DoctorError("; ".join(faults) or facts["no_gpu"])


# The checks of a model.

_TEXT = """\
The ferry leaves at six, when the lamps along the harbour are still lit and the gulls have only begun to argue about the
nets. Most of the people on board are on their way to work: a nurse with a thermos, two carpenters, a boy who carries a
cello as if it were his younger brother. Nobody talks much. The captain, who has made this crossing for twenty years,
reads the weather from the colour of the water and says that it will rain before noon. By the time the island comes out
of the mist, the coffee is gone and the first drops are falling on the deck. The carpenters pull up their hoods. The boy
takes off his coat and lays it over the cello, and the nurse, without a word, holds her umbrella over both of them.
"""
_MOST_PERPLEXITY = 1000.0
"""Small models of other languages, or of programs, stay below it; noise comes near the size of the vocabulary."""
_MOST_DIFFERENCE = 0.02  # of perplexities of a GPU and the CPU: they round differently
_CONTEXT, _SPEED_TOKENS = 1024, 33
_CONVERSATION = (
    {"role": "user", "content": "How many legs has a spider?"},
    {"role": "assistant", "content": "It has eight legs."},
    {"role": "user", "content": "And how many has an ant?"},
)


def _check_model(model: str, devices: list[str], memory: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is known of a model, and its checks; where one fails, those that need what it found are left out."""
    facts: dict[str, Any] = {"name": model}
    opened: list[Checkpoint] = []
    checks = [_check("the model's files are whole", lambda: opened.append(fetch_model(model)))]
    if not opened:
        return facts, checks
    checkpoint = opened[0]
    facts |= {
        "path": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "size_bytes": file_bytes(checkpoint),
        "has_template": plain_template(checkpoint) is not None,
        "drafter": drafter_text(checkpoint),
    }
    if facts["has_template"]:
        checks.append(_check("its chat template is the model's own", partial(_check_template, checkpoint)))
    checks.append(_check("it fits into memory", lambda: facts.update(_fitting(checkpoint, memory))))
    if not checks[-1]["ok"]:
        return facts, checks
    devices_facts: dict[str, dict[str, float]] = {}
    facts["devices"] = devices_facts
    for device in devices:
        read = partial(_read_and_write, checkpoint, device, devices_facts)
        checks.append(_check(f"it reads a text on {device}", read))
        checks.append(_check(f"its text is no noise on {device}", partial(_check_perplexity, devices_facts, device)))
    return facts, checks


def _check_template(checkpoint: Checkpoint) -> None:
    """Render a conversation, and find it in its tokens: each text, and after the answer a token that ends one."""
    from realizar.tokenizer.load import load_tokenizer
    from realizar.tokenizer.templates.chat_template import ChatTemplate

    tokenizer = load_tokenizer(checkpoint)
    ids = ChatTemplate(tokenizer).encode(_CONVERSATION)
    text = tokenizer.decode(ids, skip_special=False)
    place = 0
    for message in _CONVERSATION:
        place = text.find(message["content"], place)
        if place < 0:
            raise DoctorError(f"its prompt lacks what the {message['role']} said: {message['content']!r}")
    if not tokenizer.eos_ids.intersection(ids):
        ends = ", ".join(sorted(tokenizer.token_text(index) for index in tokenizer.eos_ids)) or "none"
        raise DoctorError(
            f"no answer in its prompt ends with a token that ends one ({ends}): it may be another model's template"
        )


def _fitting(checkpoint: Checkpoint, memory: int | None) -> dict[str, Any]:
    from realizar.backends.device_choice import choose_planned_device
    from realizar.backends.select import plan_memory, resolve_model
    from realizar.config import EngineConfig

    chosen = choose_planned_device("auto", memory_given=memory is not None)
    spec, resolved = resolve_model(checkpoint, EngineConfig(max_running=1), chosen, memory)
    plan = plan_memory(spec, checkpoint, resolved, memory)
    check_fits(plan)
    fits = [each for each in plan.contexts if each.num_requests]
    return {
        "device": plan.device,
        "needed_bytes": plan.needed_bytes,
        "longest_context": fits[-1].context_length,
    }


def _read_and_write(checkpoint: Checkpoint, device: str, facts: dict[str, dict[str, float]]) -> None:
    """Find the perplexity of a text, and the speed of a continuation."""
    from realizar.backends.bandwidth import memory_bandwidth
    from realizar.engine.llm import LLM
    from realizar.sampling_params import SamplingParams

    with LLM(checkpoint, device=device, context_length=_CONTEXT, max_running=1, prefix_cache=False) as llm:
        ids = llm.tokenizer.encode(_TEXT, parse_special=False)[: _CONTEXT - _SPEED_TOKENS - 1]
        losses = [-entry.logprob for entry in llm.score(ids) if entry is not None]
        sampling = SamplingParams(temperature=0, max_tokens=_SPEED_TOKENS, ignore_eos=True)
        output = llm.generate([ids], sampling)[0]
    facts[device] = {
        "perplexity": summary(losses)[0],
        "tokens_per_s": output.decode_tokens_per_s,
        "prompt_tokens_per_s": output.prompt_tokens_per_s,
    }
    weights = known_weights(checkpoint)
    if device == "cpu" and weights is not None:
        bandwidth = memory_bandwidth()
        facts[device] |= {"bandwidth_gb_per_s": bandwidth, "most_tokens_per_s": bandwidth * 1e9 / weights.token_bytes}


def _check_perplexity(devices: dict[str, dict[str, float]], device: str) -> None:
    if device not in devices:
        raise DoctorError("it did not read a text there")
    found, exact = devices[device]["perplexity"], devices.get("cpu", devices[device])["perplexity"]
    if not found < _MOST_PERPLEXITY:
        raise DoctorError(f"the perplexity of plain English is {found:.0f}: its weights, or a kernel, give noise")
    if abs(found / exact - 1) > _MOST_DIFFERENCE:
        raise DoctorError(f"the perplexity of a text is {found:.2f} there, and {exact:.2f} on the CPU")


def _model_lines(model: dict[str, Any]) -> list[str]:
    lines = [f"model            {model['name']}"]
    if "path" in model:
        lines.append(f"its files        {model['path']} ({format_bytes(model['size_bytes'])}, {model['architecture']})")
        template = "its own" if model["has_template"] else "none: it may be a base model, for run --raw"
        drafter = "its text alone" if model["drafter"] is None else f"{model['drafter']} (--drafter auto)"
        lines += [f"its template     {template}", f"drafts from      {drafter}"]
    if "longest_context" in model:
        needed = format_bytes(model["needed_bytes"])
        lines.append(f"its memory       {needed}, and a context of {model['longest_context']} tokens fits beside")
    for device, found in model.get("devices", {}).items():
        most = ""
        if "most_tokens_per_s" in found:
            bandwidth = f"{found['bandwidth_gb_per_s']:.1f} GB/s"
            most = f" of {found['most_tokens_per_s']:.0f} that reading the weights at {bandwidth} allows"
        lines.append(
            f"on {device:<13} perplexity {found['perplexity']:.2f}, {found['tokens_per_s']:.1f} tokens/s{most}, prompts"
            f" at {found['prompt_tokens_per_s']:.0f}"
        )
    return [*lines, ""]


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
        f"sides            {facts['sockets']} {'socket' if facts['sockets'] == 1 else 'sockets'}; {nodes}",
        f"caches           {caches or 'unknown'}",
        f"memory           {format_bytes(facts['available_bytes'])} free of {format_bytes(facts['memory_bytes'])}",
        f"instruction set  {facts['instruction_set']} (this processor has: {sets})",
        *_gpu_lines(facts, for_gpus),
        *(f"replica {number:<8} {label}" for number, label in enumerate(facts["replicas"])),
        f"models           {facts['model_cache']['path']} ({format_bytes(facts['model_cache']['size_bytes'])})",
        f"kernels          {facts['kernel_cache']['path']} ({format_bytes(facts['kernel_cache']['size_bytes'])})",
        "",
        *(_model_lines(facts["model"]) if "model" in facts else ()),
    ]
    for check in checks:
        result = f"ok ({check['seconds']:.1f} s)" if check["ok"] else f"FAILED: {check['problem']}"
        lines.append(f"{check['name']:<36} {result}")
    return lines
