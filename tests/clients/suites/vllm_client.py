"""A plugin of pytest for vLLM's client tests: a server of realizar in the place of `vllm serve`.

Run in the root of its sources. Its own modules are not needed: they are named in tests, and stand-ins take their place.
Tests that ask no server are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Self

import anthropic
import openai
import pytest

from clients.suites.real_server import ROWS, Options, Shelf
from waits import HANG_S

STAND_INS = ("vllm", "torch", "transformers", "openai_harmony", "fastapi")
# What there is not, and a part of the names of the tests that need it.
LEFT_OUT = {
    "batched_chat": "the route /v1/chat/completions/batch",
    "decisions": "vLLM's routes for decisions",
    "harmony": "gpt-oss here",
    "lora": "LoRA adapters",
    "mcp": "tools that the server runs",
    "prompt_embeds": "prompts of embeddings",
    "root_path": "a root path",
    "tensorizer": "weights of Tensorizer",
    "vlm": "images",
    "watermark": "watermarks",
}
ASKING = {"server", "client", "server_with_store"}  # the fixtures of tests that ask a server
_shelf = Shelf()


class _StandIn(ModuleType):
    """A module, class or function that is only named; it is an exception too, as tests expect some."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_StandInError,), {}) if name.endswith("Error") else _StandIn(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _StandIn("value")

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __truediv__ = __getitem__ = __or__

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()


class _StandInError(Exception):
    """An error of vLLM's."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in STAND_INS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


class RemoteOpenAIServer:
    """The suite's own class of this name: a server with the options that realizar has of the given ones."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: Any) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--max-model-len", "--max_model_len", type=int, default=2048)
        parser.add_argument("--max-num-seqs", type=int, default=ROWS)
        parser.add_argument("--served-model-name", nargs="+", default=[model])
        parser.add_argument("--chat-template")
        parser.add_argument("--api-key", action="append", default=[])
        parser.add_argument("--root-path", default="")
        given, _unknown = parser.parse_known_args([str(each) for each in vllm_serve_args])
        if given.root_path:
            pytest.skip("realizar does not have a root path")
        template = given.chat_template
        if template and "{" not in template:
            if not Path(template).exists():
                pytest.skip("its template does not lie beside the suite")
            template = Path(template).read_text()
        options = Options(
            names=tuple(given.served_model_name),
            context=min(given.max_model_len, 8192),
            rows=min(given.max_num_seqs, ROWS),
            temperature=1.0,
            api_keys=tuple(given.api_key),
            embeddings="last",
            chat_template=template,
        )
        self.url_root = _shelf.server(options).url
        self.host, _colon, port = self.url_root.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The server goes on: the next one may have the same options."""

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.strip("/") for part in parts if part)))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **_client_options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **_client_options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **_client_options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **_client_options(options))


def _client_options(given: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": RemoteOpenAIServer.DUMMY_API_KEY, "max_retries": 0, "timeout": HANG_S, **given}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Put the stand-ins in place, before the suite's conftests read them."""
    sys.path.insert(0, str(Path.cwd()))
    for name in STAND_INS:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Finder())
    utils = _StandIn("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils


def pytest_unconfigure() -> None:
    """End the server."""
    _shelf.stop()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that ask no server."""
    asked = [item for item in items if ASKING.intersection(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in asked])
    for item in asked:
        for part, lacking in LEFT_OUT.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(f"realizar does not have {lacking}"))
    items[:] = asked
