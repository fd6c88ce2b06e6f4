"""`realizar serve` serves a model through an OpenAI-compatible API, for many users at once."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from cyclopts import Parameter

from realizar.backends.load_progress import LoadProgress, no_progress
from realizar.cli.options.arguments import Integer, Models, refuse_given
from realizar.cli.options.chat_template import NO_CHAT, read_chat_template
from realizar.cli.options.engine import BatchingOptions, DraftOptions, EngineOptions
from realizar.cli.options.loading import check_for_several, drafts_lines, fetch_model, with_drafter
from realizar.cli.options.sampling import SamplingOptions
from realizar.cli.options.serve import ServerOptions
from realizar.cli.options.several_models import SeveralModelsOptions
from realizar.cli.options.sources import OptionSources
from realizar.cli.server_records import Announcement, announced
from realizar.cli.several_models import Wishes, make_shelf
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.log_lines import log_to_stderr
from realizar.cli.terminal.printable import printable, report
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import SamplingParams
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.checkpoint.model_files import ModelFiles
    from realizar.engine.frontend.async_engine import AsyncEngine
    from realizar.engine.frontend.async_link import EngineLink
    from realizar.engine.process.begun import BegunEngine
    from realizar.engine.process.messages import EngineInfo, Load
    from realizar.ray.options import RayOptions
    from realizar.ray.running import Door
    from realizar.replicas.link import ReplicaLink
    from realizar.request import Pooling
    from realizar.server.metrics import MetricSamples
    from realizar.server.models.models import ModelStatus
    from realizar.server.models.shelf import ModelShelf
    from realizar.server.processes.messages import Start
    from realizar.server.run import Front, Served
    from realizar.server.served_model import ServedModel
    from realizar.server.settings import ServerSettings


SOURCES = OptionSources()
"""Where the options of `serve` come from beside the command line."""
_DRAINS = "the server shuts down when the open requests have ended"


def serve_command(
    model: Models = (),
    *,
    models: SeveralModelsOptions | None = None,
    ray: _RayServingOptions | None = None,
    server: ServerOptions | None = None,
    batching: BatchingOptions | None = None,
    drafts: DraftOptions | None = None,
    engine: EngineOptions | None = None,
    sampling: SamplingOptions | None = None,
) -> int:
    """Serve models with the APIs of OpenAI, Anthropic and Ollama. Sampling options are defaults of requests."""
    server, models, ray = server or ServerOptions(), models or SeveralModelsOptions(), ray or _RayServingOptions()
    batching, sampling = batching or BatchingOptions(), sampling or SamplingOptions()
    several = models.several(model, server)
    with_ray = ray.checked(server, several=several)
    config = (drafts or DraftOptions()).config(batching.config((engine or EngineOptions()).config()))
    if several:
        check_for_several(config)
    sampling.checked()
    settings = server.settings()
    serving = _Serving(server, config, batching.max_queued, sampling, read_chat_template(server.chat_template))
    if server.print_config:
        print(*map(printable, SOURCES.lines()), sep="\n")
        return 0
    if with_ray:
        return serving.with_ray(model[0], ray)
    log_to_stderr(server.log_level, server.log_format)
    with nullcontext() if several or server.replicas > 1 else begun_engine() as begun:
        return _listen(replace(serving, begun=begun), model, models, settings, several=several)


@contextmanager
def begun_engine() -> Iterator[BegunEngine | None]:
    """The process of an engine, which imports what it needs beside this one; None where it can't be started now."""
    from realizar.engine.process.begun import BegunEngine

    try:
        begun = BegunEngine()
    except OSError:  # the server's link tries again, and says why
        yield None
        return
    try:
        yield begun
    finally:
        begun.end()


def _listen(
    serving: _Serving, model: Models, models: SeveralModelsOptions, settings: ServerSettings, *, several: bool
) -> int:
    """Open the port and serve; the exit status."""
    from realizar.server.http.clients import is_loopback
    from realizar.server.run import open_port

    server = serving.server
    fitting = fit_connections(settings.max_connections)
    if fitting < settings.max_connections:
        report(f"warning: the server takes at most {fitting} connections, because ulimit -n allows few open files")
        settings = replace(settings, max_connections=fitting)
    with open_port(server.host, server.port) as listener:
        url = _url("https" if settings.tls_key else "http", server.host, listener.getsockname()[1])
        if not settings.api_keys and not is_loopback(server.host):
            report("warning: without --api-key-file, everyone who can reach this machine may use the API")
        if several:
            wishes = Wishes(serving.config, serving.sampling_of, serving.max_queued, server.log_level)
            return _serve_several(make_shelf(model, models, wishes, settings), settings, listener, url)
        processes = server.num_api_processes(serving.config.device)
        shares = [settings.share(place, processes) for place in range(processes)]
        return serving.one(model[0], shares, listener, url)


@dataclass(frozen=True, slots=True)
class _Serving:
    """Serves one model as the options say; `template` replaces the model's chat template.

    A `begun` engine is told what to load before the rest is imported; another one starts with the server.
    """

    server: ServerOptions
    config: EngineConfig
    max_queued: int | None
    sampling: SamplingOptions
    template: str | None
    begun: BegunEngine | None = None

    def sampling_of(self, checkpoint: Checkpoint) -> SamplingParams:
        """The default sampling of requests."""
        from realizar.tokenizer.generation_defaults import default_sampling

        built_in = self.server.api_defaults == "openai"
        return self.sampling.apply(SamplingParams() if built_in else default_sampling(checkpoint))

    def with_ray(self, model: str, ray: _RayServingOptions) -> int:
        from realizar.ray import require_ray
        from realizar.ray.options import RayOptions
        from realizar.ray.running import Door

        require_ray()
        log_to_stderr(self.server.log_level)
        options = RayOptions(
            names=self.server.served_model_name,
            config=self.config,
            settings=replace(self.server.settings(), tls_certificate=None, tls_key=None),
            max_queued=self.max_queued,
            sampling=self.sampling_of(fetch_model(model, mmproj=self.config.mmproj)),
            chat_template=self.template,
            min_replicas=ray.min_replicas,
            max_replicas=ray.min_replicas if ray.max_replicas is None else ray.max_replicas,
            target_requests=ray.target_requests,
            fronts=self.server.api_processes or 1,
            log_level=self.server.log_level,
        )
        door = Door(self.server.host, self.server.port, _cluster_files(self.server))
        url = _url("https" if door.tls else "http", self.server.host, self.server.port)
        return _run_application(model, options, door, ray.ray_address, url)

    def one(self, model: str, shares: Sequence[ServerSettings], listener: socket.socket, url: str) -> int:
        """Serve, with settings for each process that answers requests; more than one are processes of their own."""
        served, running, front, replicas = self.prepare(model, shares)
        report(f"{served.name} is being loaded; {url} answers already")
        if served.template is None:
            report(f"chat is refused: {NO_CHAT}")
        with announced(url, served.names) as listed, ExitStack() as loading:
            if replicas is not None:
                replicas.when_changed(lambda states: listed.update(replica_states=list(states)))

            def ready() -> None:
                loading.close()
                info = running.info
                listed.update(device=info.device_label, device_bytes=_device_bytes(info))
                for line in describe(info, self.config, served.context_length, running.max_queued):
                    report(line)

            progress = loading.enter_context(load_progress())
            hang_up = None if replicas is None else replicas.restart_in_turn
            return _run(front, running, listener, listed, url, ready, loading=progress, hang_up=hang_up)

    def prepare(
        self, model: str, shares: Sequence[ServerSettings]
    ) -> tuple[ServedModel, AsyncEngine, Front, ReplicaLink | None]:
        """Make the served model, an engine, what answers requests, and its replicas."""
        from realizar.engine.process.messages import Load

        checkpoint = fetch_model(model, mmproj=self.config.mmproj)
        level = self.server.log_level.upper()
        load = Load(str(checkpoint.path), with_drafter(self.config), fit_context=True, log_level=level)
        if self.begun is not None:
            self.begun.send(load)
        from realizar.checkpoint.model_files import ModelFiles
        from realizar.engine.process.supervisor import ProcessLink
        from realizar.models.pooling import default_pooling
        from realizar.models.registry import build_spec
        from realizar.server.app import create_app
        from realizar.server.models.names import default_name
        from realizar.server.processes.hub import Hub
        from realizar.server.run import OwnFront
        from realizar.server.served_model import make_served_model

        served = make_served_model(
            checkpoint,
            self.server.served_model_name or (default_name(model),),
            self.config.context_length or build_spec(checkpoint).context_length,
            self.sampling_of(checkpoint),
            self.template,
            config=self.config,
        )
        files, pooling = ModelFiles(checkpoint), default_pooling(checkpoint)
        replicas = _replicas(load, files, self.server.replicas) if self.server.replicas > 1 else None
        link: EngineLink = ProcessLink(load, files=files, begun=self.begun) if replicas is None else replicas
        more_samples = tuple if replicas is None else partial(_samples_of, replicas, served.name)
        if len(shares) == 1:
            running = served.engine(link, self.max_queued, pooling)
            own = OwnFront(create_app(running, served, shares[0], more_samples=more_samples), shares[0])
            return served, running, own, replicas
        starts = self._starts(str(checkpoint.path), served, shares, pooling)
        hub = Hub(link, starts, served.name, more_samples=more_samples, max_queued=self.max_queued)
        return served, hub.engine, hub, replicas

    def _starts(
        self, path: str, served: ServedModel, shares: Sequence[ServerSettings], pooling: Pooling | None
    ) -> list[Start]:
        """The first messages of the processes that answer requests."""
        from realizar.server.processes.messages import Start

        return [
            Start(
                model=path,
                names=served.names,
                context_length=served.context_length,
                sampling=served.default_sampling,
                chat_template=self.template,
                created_s=served.created_s,
                config=self.config,
                settings=share,
                max_queued=self.max_queued,
                pooling=pooling,
                log_level=self.server.log_level,
                log_format=self.server.log_format,
            )
            for share in shares
        ]


def _serve_several(shelf: ModelShelf, settings: ServerSettings, listener: socket.socket, url: str) -> int:
    from realizar.server.app import create_app_of
    from realizar.server.run import OwnFront

    names = [each.names[0] for each in shelf.listed()]
    with announced(url, names) as listed:

        def list_models(models: Sequence[ModelStatus]) -> None:
            loaded = [each for each in models if each.device is not None]
            listed.update(
                models=[each.names[0] for each in models],
                device=", ".join(dict.fromkeys(each.device_label or "" for each in loaded)),
                device_bytes=sum(each.held_bytes for each in loaded if each.device != "cpu"),
                model_states=[each.state for each in models],
            )

        shelf.when_changed(list_models)
        return _run(OwnFront(create_app_of(shelf, settings), settings), shelf, listener, listed, url)


def _run(
    front: Front,
    served: Served,
    listener: socket.socket,
    listed: Announcement,
    url: str,
    ready: Callable[[], None] = lambda: None,
    *,
    loading: LoadProgress = no_progress,
    hang_up: Callable[[], None] | None = None,
) -> int:
    """Run a server that is listed; its exit status."""
    from realizar.server.run import run_server

    def is_ready() -> None:
        ready()
        listed.update(state="ready")
        report(f"ready: {url}")

    def draining(num_open: int) -> None:
        listed.update(state="draining")
        report(f"{_DRAINS} ({num_open}); a second signal stops it at once")

    return run_server(front, served, listener, loading=loading, ready=is_ready, draining=draining, hang_up=hang_up)


def _replicas(load: Load, files: ModelFiles, count: int) -> ReplicaLink:
    from realizar.replicas.link import make_replica_link
    from realizar.replicas.planning import plan_replicas

    planned = plan_replicas(load.model, load.config, count)
    for number, each in enumerate(planned):
        report(f"replica {number}: {each.label}")
    return make_replica_link(load, planned, files)


def _samples_of(replicas: ReplicaLink, name: str) -> tuple[MetricSamples, ...]:
    from realizar.server.replica_figures import replica_samples

    return replica_samples(replicas, name)


def describe(info: EngineInfo, config: EngineConfig, model_context: int, max_queued: int) -> list[str]:
    capacity = info.capacity
    context = f"{info.context_length} tokens a request"
    if info.max_request_tokens < info.context_length:
        context += f", at most {info.max_request_tokens} for lack of KV cache"
    if config.context_length is None and info.context_length < model_context:
        context += f", as the model's {model_context} do not fit into memory"
    tokens = min(capacity.num_blocks) * capacity.block_size
    return [
        f"context: {context}",
        f"answers: {info.max_running} at once, {max_queued} queued",
        f"KV cache: {format_bytes(capacity.kv_cache_bytes)} of {capacity.kv_cache_dtype} for {tokens} tokens",
        f"weights: {format_bytes(capacity.weight_bytes)} in memory, loaded in {capacity.load_s:.1f} s",
        *drafts_lines(config.drafter, info.drafter, capacity.num_drafts),
        f"threads: {info.threads}" if info.device_label == "cpu" else f"device: {info.device_label}",
    ]


def _device_bytes(info: EngineInfo) -> int:
    """Weights and KV cache on a GPU; 0 on a CPU, where they are the memory of the engine's process."""
    return 0 if info.device == "cpu" else info.capacity.weight_bytes + info.capacity.kv_cache_bytes


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# Options of a server on many hosts.


@Parameter(name="*", group="Ray", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class _RayServingOptions:
    """Options of a server whose engines Ray Serve starts, on many hosts.

    Attributes:
        ray: serve with Ray Serve: engines on the hosts of a cluster of Ray's, as many as the requests need.
        ray_address: address of the cluster's head; default RAY_ADDRESS, else this host's cluster, which may be started.
        min_replicas: engines that run in any case.
        max_replicas: engines that run when many requests wait; default --min-replicas.
        target_requests: open requests of an engine beyond which another starts; default as many as can run.
    """

    ray: bool = False
    ray_address: str | None = None
    min_replicas: Integer = 1
    max_replicas: Annotated[Integer | None, Parameter(name="--max-replicas")] = None
    target_requests: float | None = None

    def checked(self, server: ServerOptions, *, several: bool) -> bool:
        """True if Ray Serve is wanted. It raises InvalidRequestError if an option does not suit that."""
        if not self.ray:
            refuse_given(self, ("ray_address", "min_replicas", "max_replicas", "target_requests"), "is for --ray")
            return False
        if server.replicas > 1:
            raise InvalidRequestError("--replicas are for one host; --ray takes --min-replicas", "replicas")
        if several:
            raise InvalidRequestError("--ray serves a single model", "ray")
        refuse_given(server, ("max_connections",), "can't hold with --ray: connections are Ray Serve's")
        refuse_given(server, ("log_format",), "can't hold with --ray: the log's form are Ray Serve's")
        return True


def _cluster_files(server: ServerOptions) -> tuple[str, str] | None:
    """Paths of the certificate and its key, which every host needs that takes connections."""
    if server.tls_cert is None:
        return None
    found: tuple[Path, Path] = (server.tls_cert, server.tls_key or server.tls_cert)
    return str(found[0].absolute()), str(found[1].absolute())


# The limit of open files bounds the number of connections.

_OWN_FILES = 64  # the model, the engine's sockets, the log, the event loop, and connections that are being refused


def fit_connections(wanted: int) -> int:
    """Raise the limit of open files as far as needed and allowed; returns the number of connections that fit.

    It raises RealizarError if no connection fits.
    """
    import resource  # which Windows lacks

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):  # macOS has a limit of its own below the hard one
        most = soft
    if most <= _OWN_FILES:
        raise RealizarError(f"this process may open {most} files (ulimit -n); a server needs more than {_OWN_FILES}")
    return most - _OWN_FILES


# Ray Serve starts the application, and ends it on a signal.

_POLL_S = 0.2


def _run_application(model: str, options: RayOptions, door: Door, address: str | None, url: str) -> int:
    """Serve until a signal; the exit status is 0, or 128 plus the number of a second signal.

    `address` is the cluster's; None takes RAY_ADDRESS, else this host's cluster. `url` is where this host answers. It
    raises RealizarError if Ray Serve is not installed, or the application can't be started.
    """
    from realizar.ray.running import start_application, stop_application

    with _Signals() as signals:
        report(f"{model} is being loaded by Ray Serve")
        application = start_application(model, options, door, address)
        with announced(url, application.names) as listed:
            listed.update(state="ready")
            signals.interrupt = False
            report(f"engines: {options.min_replicas} to {options.max_replicas}, {application.placement}")
            report(f"ready: {url}")
            signals.first.wait()
            listed.update(state="draining")
            report(f"{_DRAINS}; a second signal stops it at once")
            stopping = threading.Thread(target=stop_application, args=(application,), daemon=True)
            stopping.start()
            while stopping.is_alive() and not signals.later:
                stopping.join(_POLL_S)
    return 128 + signals.later[0] if signals.later else 0


class _Signals:
    """SIGTERM and SIGINT: `first` is set by the first signal, `later` has the numbers of those after it.

    While `interrupt` is True, a signal interrupts what is going on: the start, which may wait for ever for a host.
    """

    def __init__(self) -> None:
        self.interrupt, self.first = True, threading.Event()
        self.later: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.interrupt:
            raise KeyboardInterrupt
        if self.first.is_set():
            self.later.append(number)
        self.first.set()
