"""Options of `realizar serve`: their aliases, what they become, and what is refused."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App, CycloptsError

from realizar.backends.base import Capacity
from realizar.cli.commands.serve import _Serving, describe
from realizar.cli.options.chat_template import read_chat_template
from realizar.cli.options.engine import BatchingOptions, EngineOptions
from realizar.cli.options.sampling import SamplingOptions
from realizar.cli.options.serve import ServerOptions, read_keys
from realizar.cli.options.several_models import SeveralModelsOptions
from realizar.config import EngineConfig
from realizar.engine.process.messages import EngineInfo
from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import SamplingParams
from realizar.server.processes.hub import Hub
from realizar.server.run import OwnFront, open_port

BASE = EngineConfig(threads=3)


def parsed(*words: str) -> tuple[ServerOptions, BatchingOptions, EngineOptions]:
    app = App(result_action="return_value")
    found: list[Any] = []

    @app.default
    def command(
        *,
        server: ServerOptions | None = None,
        batching: BatchingOptions | None = None,
        engine: EngineOptions | None = None,
    ) -> None:
        found.extend((server or ServerOptions(), batching or BatchingOptions(), engine or EngineOptions()))

    app(list(words), exit_on_error=False, print_error=False)
    return found[0], found[1], found[2]


def test_nothing_given_is_the_defaults() -> None:
    server, batching, _ = parsed()
    assert batching.config(BASE) == BASE
    assert batching.max_queued is None
    assert (server.host, server.port) == ("127.0.0.1", 8000)
    settings = server.settings()
    assert (settings.api_keys, settings.cors_origins, settings.web_page) == ((), (), True)


@pytest.mark.parametrize("name", ["--max-running", "--max-num-seqs", "--parallel", "-np"])
def test_names_of_other_servers(name: str) -> None:
    assert parsed(name, "7")[1].config(BASE).max_running == 7


@pytest.mark.parametrize("name", ["--context-length", "--ctx-size", "--max-model-len", "-c"])
def test_names_of_the_context(name: str) -> None:
    assert parsed(name, "900")[2].context_length == 900


@pytest.mark.parametrize(
    ("text", "size"),
    [("8G", 8 * 10**9), ("512MiB", 512 << 20), ("1.5k", 1500), ("100", 100), ("2 TB", 2 * 10**12), ("1Gi", 1 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parsed("--kv-cache-bytes", text)[1].config(BASE).kv_cache_bytes == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "8X", "1e9", "8GG"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(CycloptsError):
        parsed(f"--kv-cache-bytes={text}")


def test_batching_becomes_the_configuration() -> None:
    words = ("--max-step-tokens", "64", "--no-prefix-cache", "--max-queued", "0")
    batching = parsed(*words)[1]
    config = batching.config(BASE)
    assert (config.max_step_tokens, config.prefix_cache) == (64, False)
    assert (config.threads, batching.max_queued) == (3, 0)


@pytest.mark.parametrize("words", [("--max-queued", "-1"), ("--max-running", "0")])
def test_values_out_of_range(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        parsed(*words)[1].config(BASE)


def test_origins_and_names_may_be_repeated() -> None:
    origins = ("http://a", "http://[::1]:3000", "*", "null")
    words = [word for origin in origins for word in ("--cors-origin", origin)]
    words += ["--image-host", "A.example:8443", "--allowed-media-domains", "[2001:DB8::1]"]
    server = parsed(*words, "--allowed-origins", "http://b", "--served-model-name", "x", "--alias", "y")[0]
    assert server.settings().image_hosts == ("a.example:8443", "[2001:db8::1]")
    assert server.settings().cors_origins == (*origins, "http://b")
    assert server.served_model_name == ("x", "y")


@pytest.mark.parametrize(
    "words",
    [
        ("--cors-origin", "example.org"),
        ("--cors-origin", "https://example.org/"),
        ("--cors-origin", ""),
        ("--image-host", "https://example.org"),
        ("--image-host", "example.org/a"),
        ("--image-host", "*"),
        ("--image-host", "example.org:x"),
        ("--traces-endpoint", "collector:4318"),
        ("--traces-endpoint", ""),
    ],
)
def test_addresses_that_would_never_be_met(words: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{words[0]} must be .* not '{words[1]}'"):
        parsed(*words)[0].settings()


def test_keys_are_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nalpha\n\n  beta \t weight=3\ngamma weight=3 x\n")
    path.chmod(stat.S_IRUSR)
    settings = parsed("--api-key-file", str(path))[0].settings()
    assert (settings.api_keys, settings.key_weights) == (("alpha", "beta", "gamma weight=3 x"), (1, 3, 1))
    assert not caplog.records
    path.chmod(0o644)
    read_keys(path)
    assert "every user" in caplog.text


@pytest.mark.parametrize("weight", ["0", "1001", "-1", "x", "", "1.5", "9" * 4500])
def test_weights_that_no_key_can_have(tmp_path: Path, weight: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alpha\nbeta weight={weight}\n")
    with pytest.raises(RealizarError, match="weight") as refused:
        parsed("--api-key-file", str(path))[0].settings()
    assert "beta" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe"])
def test_files_without_keys(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(RealizarError, match="keys"):
        read_keys(path)
    with pytest.raises(RealizarError, match="No such file"):
        read_keys(tmp_path / "absent")


def info(context_length: int, max_request_tokens: int) -> EngineInfo:
    capacity = Capacity(32, (100, 64), 96_400_000, 1, 3_070_000_000, "f16", 0.52)
    return EngineInfo("llama", 512, 256, context_length, max_request_tokens, 8, capacity, 1, 32, 3, 16)


@pytest.mark.parametrize(
    ("known", "config", "line"),
    [
        (info(2048, 2048), BASE, "context: 2048 tokens a request"),
        (info(2048, 640), BASE, "context: 2048 tokens a request, at most 640 for lack of KV cache"),
        (info(1024, 1024), BASE, "context: 1024 tokens a request, as the model's 2048 do not fit into memory"),
        (info(1024, 1024), EngineConfig(context_length=1024, threads=3), "context: 1024 tokens a request"),
    ],
)
def test_what_was_chosen_is_said(known: EngineInfo, config: EngineConfig, line: str) -> None:
    assert describe(known, config, 2048, 5) == [
        line,
        "answers: 8 at once, 5 queued",
        "KV cache: 3.07 GB of f16 for 2048 tokens",
        "weights: 96.4 MB in memory, loaded in 0.5 s",
        "threads: 3",
    ]


def test_a_folders_models_are_no_parts_and_nothing_that_lies_beside_them(tmp_path: Path) -> None:
    parts = [f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in (*parts, "b.gguf", "mmproj-F16.gguf", "mtp-b.gguf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").touch()
    found = SeveralModelsOptions(model_folder=tmp_path).in_folder()
    assert [path.name for path in found] == [parts[0], "b.gguf", "c"]


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_ports_that_are_none(port: int) -> None:
    """The resolver would take them modulo 65536, and the server would listen elsewhere."""
    with pytest.raises(RealizarError, match=f"65535, not {port}"):
        open_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("words", "sampling", "wanted"),
    [
        ((), SamplingOptions(), SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)),
        (
            (),
            SamplingOptions(temperature=0.1, min_p=0.0),
            SamplingParams(temperature=0.1, top_k=40, top_p=0.95, min_p=0.0),
        ),
        (("--api-defaults", "openai"), SamplingOptions(), SamplingParams()),
        (("--api-defaults", "openai"), SamplingOptions(max_tokens=9), SamplingParams(max_tokens=9)),
    ],
)
def test_sampling_of_requests_that_name_none(
    smollm2_path: Path, words: tuple[str, ...], sampling: SamplingOptions, wanted: SamplingParams
) -> None:
    server, batching, _ = parsed(*words)
    serving = _Serving(server, BASE, batching.max_queued, sampling, None)
    served, *_ = serving.prepare(str(smollm2_path), [server.settings()])
    assert served.default_sampling == wanted


def test_one_api_process_is_the_main_one(tiny_path: Path) -> None:
    server, batching, _ = parsed()
    serving = _Serving(server, BASE, batching.max_queued, SamplingOptions(), None)
    fronts = [serving.prepare(str(tiny_path), [server.settings()] * count)[2] for count in (1, 2)]
    assert [type(front) for front in fronts] == [OwnFront, Hub]


@pytest.mark.parametrize(
    ("words", "device", "cores", "count"),
    [
        ((), "cuda", 16, 3),
        ((), "cuda:1", 9, 2),
        ((), "cuda", 3, 1),
        ((), "auto", 16, 1),
        ((), "cpu", 64, 1),
        (("--replicas", "2"), "cuda", 32, 6),
        (("--replicas", "2"), "cuda", 16, 4),
        (("--replicas", "2", "--request-memory", "128M"), "cuda", 32, 3),
        (("--request-memory", "1G"), "cuda", 32, 8),
        (("--max-body-bytes", "64M"), "cuda", 32, 1),
        (("--stored-responses", "9"), "cuda", 32, 1),
        (("--api-processes", "5"), "cpu", 2, 5),
    ],
)
def test_a_gpus_server_has_more_api_processes(
    words: tuple[str, ...], device: str, cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has no GPU. Those that are not given leave each room for two large bodies of a client."""
    monkeypatch.setattr("realizar.backends.machine.allowed_cpus", lambda: set(range(cores)))
    monkeypatch.setattr("realizar.backends.cgroup.processor_quota", lambda: None)
    monkeypatch.setattr("realizar.backends.device_choice.gpu_listed", lambda: False)
    assert parsed(*words)[0].num_api_processes(device) == count


def test_connections_and_memory_are_divided_among_processes() -> None:
    settings = parsed("--max-connections", "8", "--request-memory", "9M")[0].settings()
    shares = [settings.share(place, 3) for place in range(3)]
    assert [share.max_connections for share in shares] == [3, 3, 2]
    assert {share.request_memory_bytes for share in shares} == {settings.request_memory_bytes // 3}
    assert {share.image_memory_bytes for share in shares} == {(2 << 30) // 3}
    assert settings.share(0, 1) == settings
    with pytest.raises(InvalidRequestError, match="9 API processes need as many connections") as refused:
        settings.share(0, 9)
    assert refused.value.param == "max_connections"


def test_a_template_of_a_file_is_served(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("<{{ messages[-1].content }}>")
    server, batching, _ = parsed("--chat-template", str(file))
    template = read_chat_template(server.chat_template)
    serving = _Serving(server, BASE, batching.max_queued, SamplingOptions(), template)
    served, *_ = serving.prepare(str(tiny_path), [server.settings()])
    assert served.template is not None
    assert served.template.source() == "<{{ messages[-1].content }}>"
