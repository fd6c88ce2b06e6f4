"""`realizar serve --allow-pull` against a hub on this machine: pulled models answer, and are there after a restart."""

from __future__ import annotations

from pathlib import Path

import httpx
import ollama
import pytest

from engine.process.served import serving
from hub.fake_hub import fake_hub
from realizar.cli.server_records import running_servers, servers_folder
from waits import HANG_S

OPTIONS = ("--context-length", "512", "--kv-cache-bytes", "4M", "--max-running", "4")
NAME = "hf.co/user/tiny:latest"


def test_a_client_pulls_asks_and_finds_it_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub({"user/tiny": {"tiny-F32.gguf": tiny.read_bytes()}}) as hub:
        for variable, value in hub.variables(tmp_path).items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        with serving("--allow-pull", *OPTIONS) as server, ollama.Client(server.wait_ready(), timeout=HANG_S) as client:
            assert client.list().models == []
            assert [each.models for each in running_servers(servers_folder())] == [[]]
            with pytest.raises(ollama.ResponseError, match="does not exist on the endpoint"):
                list(client.pull("user/gone", stream=True))
            *_, before, end = client.pull(NAME, stream=True)
            assert (before.status, end.status) == ("writing manifest", "success")
            assert [model.model for model in client.list().models] == ["user/tiny:latest"]
            assert [each.models for each in running_servers(servers_folder())] == [["user/tiny"]]  # of `realizar ps`
            assert client.generate(NAME, "Once", options={"num_predict": 3}).eval_count == 3
        with serving("--allow-pull", *OPTIONS) as server:
            url = server.wait_ready()
            assert [each["id"] for each in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]] == ["user/tiny"]
