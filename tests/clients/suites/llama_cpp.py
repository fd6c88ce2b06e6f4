"""A plugin of pytest for llama.cpp's server tests: a server of realizar in the place of llama-server.

Run in `tools/server/tests` of its sources. Nothing there is changed: what starts a server and names its paths is
replaced in memory, and a test of what realizar has no route or option for is left out with that reason.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clients.suites.real_server import Options, Shelf
from realizar.errors import RealizarError

# What has the same name under /v1 alone here.
ALIASES = ("/chat/completions", "/embeddings", "/models", "/responses")
ROUTES = (
    *("/health", "/metrics", "/tokenize", "/detokenize", "/rerank", "/v1/models", "/v1/chat/completions"),
    *("/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
# Names that its tests ask for: llama-server takes any.
NAMES = ("codellama70b", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002", "test", "text-embedding-3-small")
FEATURES = {
    "lora_files": "LoRA adapters",
    "model_draft": "draft models",
    "spec_type": "draft models",
    "mmproj_url": "images",
    "media_path": "images",
    "slot_save_path": "files of slots",
    "enable_ctx_shift": "contexts that shift",
    "server_tools": "tools that the server runs",
    "mcp_servers_config": "tools that the server runs",
    "mcp_servers_json": "tools that the server runs",
    "ui_mcp_proxy": "a proxy for other servers",
    "gcp_compat": "Vertex AI's routes",
    "models_dir": "folders of models",
    "models_preset": "folders of models",
    "log_path": "lines of llama.cpp's log",
    "sleep_idle_seconds": "models that sleep by themselves",
    "backend_sampling": "a choice of who samples",
    "reasoning_format": "a choice of where reasoning goes",
}
_shelf = Shelf()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace what starts servers, before the suite's own conftest reads it."""
    sys.path.insert(0, str(Path.cwd()))
    wget = ModuleType("wget")
    wget.download = _no_download  # type: ignore[attr-defined]
    sys.modules["wget"] = wget
    utils = importlib.import_module("utils")
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    for name, replaced in (("start", _start), ("stop", lambda _: None), ("make_url", _url)):
        setattr(utils.ServerProcess, name, replaced)
    utils.parallel_function_calls = _all_at_once


def pytest_unconfigure() -> None:
    """End the server."""
    _shelf.stop()


def _start(server: Any, timeout_seconds: float = 0) -> None:
    for option, feature in FEATURES.items():
        if getattr(server, option, None):
            pytest.skip(f"realizar does not have {feature}")
    if not (server.model_hf_repo or server.model_file):
        pytest.skip("realizar does not have routes that load models")
    if server.model_hf_repo and "stories260K" not in server.model_hf_repo and not server.server_embeddings:
        pytest.skip(f"needs the model {server.model_hf_repo}")
    template = server.chat_template
    if server.chat_template_file:
        if not Path(server.chat_template_file).exists():
            pytest.skip("its template does not lie beside the suite")
        template = Path(server.chat_template_file).read_text()
    elif template and "{" not in template:
        pytest.skip("realizar knows no templates by name")
    slots = server.n_slots or 4
    options = Options(
        names=tuple(dict.fromkeys((server.model_alias or "smollm2", *NAMES))),
        context=max((server.n_ctx or 2048) // (1 if server.kv_unified else slots), 128),
        rows=slots,
        max_tokens=server.n_predict if server.n_predict and server.n_predict > 0 else None,
        temperature=server.temperature,
        seed=server.seed,
        api_keys=(server.api_key,) if server.api_key else (),
        origins=tuple(server.cors_origins.split(",")) if server.cors_origins else (),
        embeddings=("last" if server.pooling == "last" else "mean") if server.server_embeddings else None,
        chat_template=template,
    )
    try:
        url = _shelf.server(options).url
    except RealizarError as error:
        pytest.fail(f"the server does not start: {error}")
    server.server_port = int(url.rpartition(":")[2])
    os.environ["PORT"] = str(server.server_port)


def _no_download(url: str, **_: Any) -> None:
    pytest.skip(f"{url} is not fetched")


def _all_at_once(calls: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> list[Any]:
    """As the one that is replaced, but what a thread raises is the test's outcome."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call[0](*call[1]), calls))


def _url(server: Any, path: str, host: str | None = None) -> str:
    bare = path.partition("?")[0]
    if bare in ALIASES:
        path = f"/v1{path}"
    elif bare not in ROUTES:
        pytest.skip(f"realizar does not have the route {bare}")
    return f"http://{host or '127.0.0.1'}:{server.server_port}{path}"
