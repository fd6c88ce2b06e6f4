"""Pulled models are deleted, and nothing else is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from realizar.cli.main import app, run_app
from realizar.errors import HubError
from realizar.hub.pull import BUILTIN_MODELS, plan_removal, remove

FILES = {"Q4_K_M": {"m-Q4_K_M.gguf": b"four bits"}, "Q8_0": {"m-Q8_0.gguf": b"eight bits", "shared.json": b"{}"}}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty caches, ours and Hugging Face's; the latter is returned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def pulled(cache: Path) -> Callable[..., Path]:
    """Call it with a quantization to have it as a pull leaves it: contents, links to them, a record."""

    def pull(quantization: str, commit: str = "0" * 40, listed: list[str] | None = None) -> Path:
        repository = cache / "models--user--quants"
        snapshot = repository / "snapshots" / commit
        for folder in (snapshot, repository / "blobs"):
            folder.mkdir(parents=True, exist_ok=True)
        files = FILES[quantization]
        for name, content in files.items():
            (repository / "blobs" / name).write_bytes(content)
            if not (snapshot / name).is_symlink():
                (snapshot / name).symlink_to(Path("../../blobs") / name)
        folder = _record_folder(quantization)
        folder.mkdir(parents=True, exist_ok=True)
        paths = listed or [str(snapshot / name) for name in files]
        record = {"name": f"user/quants:{quantization}", "path": paths[0], "files": paths}
        (folder / "pulled.json").write_text(json.dumps(record))
        return snapshot

    return pull


def _record_folder(quantization: str) -> Path:
    from realizar.hub.cache import models_dir
    from realizar.hub.names import parse_name

    name = parse_name(f"user/quants:{quantization}")
    assert name is not None
    return models_dir() / name.folder_name


def test_a_model_of_wheels(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = BUILTIN_MODELS["smollm2:135m"]
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(bytes(1_500_000))
    other = BUILTIN_MODELS["gemma3:270m"].path
    other.parent.mkdir(parents=True)
    other.write_bytes(b"x")
    assert run_app(app, ["rm", "SmolLM2:135m"]) == 0
    assert capsys.readouterr().out == "removed smollm2:135m (1.5 MB)\n"
    assert not model.path.parent.exists()
    assert other.exists()
    assert run_app(app, ["rm", "smollm2:135m"]) == 1
    assert "is not pulled" in capsys.readouterr().err


def test_only_the_models_own_files_of_a_shared_cache(cache: Path, pulled: Callable[..., Path]) -> None:
    snapshot = pulled("Q4_K_M")
    pulled("Q8_0")
    removal = plan_removal("user/quants:Q4_K_M")
    assert removal.size_bytes == len(FILES["Q4_K_M"]["m-Q4_K_M.gguf"])
    remove(removal)
    assert sorted(path.name for path in snapshot.iterdir()) == ["m-Q8_0.gguf", "shared.json"]
    blobs = cache / "models--user--quants" / "blobs"
    assert sorted(path.name for path in blobs.iterdir()) == ["m-Q8_0.gguf", "shared.json"]
    assert not _record_folder("Q4_K_M").exists()
    remove(plan_removal("user/quants:Q8_0"))
    assert list(cache.iterdir()) == [], "the last one takes the repository's folder with it"


def test_a_content_that_another_revision_has_stays(cache: Path, pulled: Callable[..., Path]) -> None:
    pulled("Q8_0", commit="1" * 40)
    snapshot = pulled("Q8_0")
    remove(plan_removal("user/quants:Q8_0"))
    assert not snapshot.exists()
    kept = cache / "models--user--quants/snapshots" / ("1" * 40) / "m-Q8_0.gguf"
    assert kept.read_bytes() == b"eight bits"


def test_a_file_that_another_pulled_model_lists_stays(cache: Path, pulled: Callable[..., Path]) -> None:
    snapshot = pulled("Q8_0")
    pulled("Q4_K_M", listed=[str(snapshot / "m-Q4_K_M.gguf"), str(snapshot / "shared.json")])
    assert (snapshot / "m-Q4_K_M.gguf").exists()
    remove(plan_removal("user/quants:Q4_K_M"))
    assert sorted(path.name for path in snapshot.iterdir()) == ["m-Q8_0.gguf", "shared.json"]


def test_a_record_can_not_name_other_files(cache: Path, pulled: Callable[..., Path], tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    outside = cache / "models--user--quants" / "snapshots" / "x" / ".." / ".." / ".." / ".." / "precious.txt"
    pulled("Q4_K_M", listed=[str(precious), str(outside)])
    removal = plan_removal("user/quants:Q4_K_M")
    assert removal.files == ()
    remove(removal)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["nonesuch", "./model.gguf", "/etc/passwd", "user/quants:Q4_K_M", "gemma3:270m"])
def test_what_was_not_pulled_is_not_removed(cache: Path, name: str) -> None:
    with pytest.raises(HubError, match=name.replace(".", r"\.")):
        plan_removal(name)


@pytest.mark.parametrize(("words", "answer", "gone"), [((), "y\n", True), ((), "\n", False), (("--yes",), "", True)])
def test_a_shared_cache_is_asked_about(
    pulled: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    answer: str,
    gone: bool,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    snapshot = pulled("Q4_K_M")
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert run_app(app, ["rm", "user/quants:Q4_K_M", *words]) == 0
    assert snapshot.exists() != gone
    assert ("other programs" in capsys.readouterr().err) == (not words)


def test_without_a_terminal_it_must_be_said(pulled: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = pulled("Q4_K_M")
    assert run_app(app, ["rm", "user/quants:Q4_K_M"]) == 1
    assert "--yes" in capsys.readouterr().err
    assert snapshot.exists()
