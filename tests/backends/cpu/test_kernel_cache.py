"""Compiled kernels: in the cache, in the package, and what happens where neither can be read or written."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit, types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from release.wheel_kernels import kernels_of_kind

import realizar
from realizar.backends.cpu import compile_ahead, instruction_set, kernel_cache, load, threads
from realizar.backends.cpu.compile_ahead import CompileAhead
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS, KINDS, index_of, known_kind
from realizar.backends.cpu.kernel import Kernel, make_kernel
from realizar.backends.cpu.kernel_cache import (
    CompiledKernel,
    archive_of,
    cache_folder,
    forget_old_folders,
    has_kernel,
    keep_kernel,
    read_kernel,
    target,
    use_cache_folder,
)
from realizar.backends.cpu.kernels.ranks import squares
from realizar.backends.select import begin_compiling
from realizar.config import EngineConfig
from realizar.engine.llm import LLM
from tiny_model import write_tiny_model
from waits import HANG_S

open_archive = kernel_cache._archive.__wrapped__


def test_folders_used_last_stay(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "newer", "old", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel").write_bytes(b"code")
        os.utime(tmp_path / name, (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "file").write_text("not a folder")
    forget_old_folders(tmp_path, tmp_path / "newest", keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "newer", "newest", "old"]
    forget_old_folders(tmp_path, tmp_path / "old", keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["file", "newest", "old"], "its own stays, whatever the clock says"


def test_a_packed_kernel_is_whole_or_an_error() -> None:
    code = CompiledKernel("cfunc.of", b"\x7fELF\n\x00")
    assert CompiledKernel.unpack(code.pack()) == code
    for broken in (b"", b"broken", code.pack()[:-1], b"\0" + code.pack()[1:]):
        with pytest.raises(ValueError, match="broken"):
            CompiledKernel.unpack(broken)


_COMPILES = """
from numba.core import event
passes = event.RecordingListener()
event.register("numba:run_pass", passes)
from realizar.backends.cpu import kernel_cache, threads
threads.exchange.call
print(threads.__file__, len(passes.buffer), sep="\\n")
"""


def compiled_by(package: Path, cache: Path) -> int:
    """Passes of the compiler in a process of that copy of the package which calls a kernel."""
    result = subprocess.run(
        [sys.executable, "-c", _COMPILES], capture_output=True, text=True, check=True, timeout=HANG_S,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(package)},
    )  # fmt: skip
    place, count = result.stdout.splitlines()
    assert Path(place).is_relative_to(package)
    return int(count)


def test_installations_find_kernels_of_the_same_sources(tmp_path: Path) -> None:
    """In the cache, and in the package; an edited source finds neither's."""
    for name in ("first", "second"):
        package, ignored = Path(realizar.__file__).parent, shutil.ignore_patterns("compiled")
        shutil.copytree(package, tmp_path / name / "realizar", ignore=ignored)
        os.utime(tmp_path / name / "realizar/backends/cpu/threads.py", (1, 1))
    cache, another = tmp_path / "cache", tmp_path / "another"
    assert compiled_by(tmp_path / "first", cache) > 0
    assert compiled_by(tmp_path / "second", cache) == 0
    archive = tmp_path / "second" / archive_of(target()).relative_to(Path(realizar.__file__).parents[1])
    archive.parent.mkdir(exist_ok=True)
    (kept,) = cache.rglob("threads exchange")
    with zipfile.ZipFile(archive, "w") as file:
        file.write(kept, kept.name)
    assert compiled_by(tmp_path / "second", another) == 0
    with (tmp_path / "second/realizar/backends/cpu/memory.py").open("a") as source:
        source.write("# edited\n")
    assert compiled_by(tmp_path / "second", another) > 0


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings of a process that has given none yet."""
    monkeypatch.setattr(kernel_cache, "_REPORTED", [])
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("place", ["file", "below a file", "no home"])
def test_without_a_place_kernels_are_not_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").write_text("")
    named = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "below", "no home": Path()}[place]
    monkeypatch.setenv("XDG_CACHE_HOME", str(named))
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for _ in range(2):
        assert use_cache_folder.__wrapped__() is None
    assert len(warnings()) == 1
    assert "the kernel cache fails" in warnings()[0]
    monkeypatch.setattr(kernel_cache, "use_cache_folder", lambda: None)
    keep_kernel("a kernel", CompiledKernel("symbol", b"code"))
    assert read_kernel("a kernel") is None
    assert not has_kernel("a kernel")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of this process, empty, without kernels in the package."""
    monkeypatch.setattr(kernel_cache, "_archive", lambda: None)
    for module in (kernel_cache, compile_ahead):
        monkeypatch.setattr(module, "use_cache_folder", lambda: tmp_path)
    return tmp_path


def full_disk(*_arguments: object, **_options: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def anew(made: Kernel) -> Kernel:
    """A kernel as a process finds it that has not asked for it yet."""
    return Kernel(made._function, (), made._signature)


def exchanged(made: Kernel) -> tuple[int, int]:
    """What `exchange` returns and writes where a 5 was and a 7 is to be."""
    words = np.array([5])
    return made.call(words.ctypes.data, 7), words[0]


def test_a_disk_that_fills_up(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    assert [exchanged(anew(threads.exchange)) for _ in range(2)] == [(5, 7), (5, 7)]
    assert warnings() == [
        "the kernel cache fails ([Errno 28] No space left on device); this process compiles its own kernels"
    ]
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"broken", bytes(40)])
def test_a_broken_file_is_written_anew(content: bytes, own_folder: Path, warnings: Callable[[], list[str]]) -> None:
    path = own_folder / threads.exchange.name
    path.write_bytes(content)
    assert exchanged(anew(threads.exchange)) == (5, 7), "compiled"
    assert warnings() == ["the kernel cache fails (a compiled kernel is broken); this process compiles its own kernels"]
    assert CompiledKernel.unpack(path.read_bytes()).symbol.startswith("cfunc.")


def test_a_broken_archive_is_left_for_the_cache(
    own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    archive = tmp_path / "archive.zip"
    monkeypatch.setattr(kernel_cache, "archive_of", lambda _kind: archive)
    assert open_archive() is None
    archive.write_bytes(b"broken")
    assert open_archive() is None
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("one", b"broken")
    opened = open_archive()
    monkeypatch.setattr(kernel_cache, "_archive", lambda: opened)
    assert has_kernel("one")
    assert read_kernel("one") is None
    code = CompiledKernel("symbol", b"code")
    keep_kernel("one", code)
    assert read_kernel("one") == code
    assert len(warnings()) == 1


def test_what_others_compile_is_as_ever(own_folder: Path) -> None:
    """A function that a kernel calls has no machine code of its own; one that calls it, and is called here, does."""

    @njit
    def doubled(value: int) -> int:
        return value + value

    @njit
    def after(value: int) -> int:
        return doubled(value) + 1

    made = Kernel(lambda value: doubled(value), (), types.int64(types.int64))
    made.name = "doubled"
    broken = Kernel(lambda value: doubled(value).nothing, (), types.int64(types.int64))
    broken.name = "broken"
    codegen = vars(cpu_target.target_context.codegen()).copy()
    assert made.call(4) == 8
    with pytest.raises(TypingError):
        broken.keep()
    assert vars(cpu_target.target_context.codegen()) == codegen
    assert after(4) == 9


def test_processes_compile_what_is_missing(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process does, into its own cache; one that fails leaves kernels to this process, and nothing is done twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_folder))
    monkeypatch.setattr(compile_ahead, "_MOST_PROCESSES", 2)  # tests have none
    said: list[str] = []
    with CompileAhead([anew(squares), anew(squares), anew(threads.exchange)], 1, said.append):
        pass
    assert sorted(path.name for path in (cache_folder() / target()).iterdir()) == sorted(
        [squares.name, threads.exchange.name]
    )
    assert said == ["compiling 2 kernels for this processor, once"]
    monkeypatch.setattr(compile_ahead, "_COMMAND", (sys.executable, "-c", ""))
    failing = anew(threads.exchange)
    with CompileAhead([failing], 1, said.append):
        pass
    assert exchanged(failing) == (5, 7)
    with CompileAhead([failing, anew(threads.exchange)], 1, said.append):
        pass
    assert len(said) <= 2, "the last had nothing to compile"


_NOTES_NAMES = """
import sys
with open(sys.argv[1], "a") as notes:
    for line in sys.stdin:
        print(line, end="", file=notes, flush=True)
        print(flush=True)
"""


def test_a_load_goes_on_with_what_a_download_began(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same process, which is given each kernel once."""
    notes = own_folder / "notes"
    monkeypatch.setattr(compile_ahead, "_MOST_PROCESSES", 2)
    monkeypatch.setattr(compile_ahead, "_COMMAND", (sys.executable, "-c", _NOTES_NAMES, str(notes)))
    compile_ahead.begin([anew(squares)], 1)
    for kernels in ([squares, threads.exchange], [threads.exchange]):
        with CompileAhead([anew(each) for each in kernels], 1, lambda _: None):
            pass
    assert notes.read_text().split("\n") == [squares.name, threads.exchange.name, threads.exchange.name, ""]


def test_what_is_compiled_beside_a_download_is_what_a_load_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path / "tiny.gguf")
    config = EngineConfig(device="cpu", threads=1, context_length=64, max_running=1)
    begun: set[str] = set()
    needed: set[str] = set()
    ahead = load.CompileAhead

    def noted(kernels: list[Kernel], cores: int, on_compile: Callable[[str], None]) -> CompileAhead:
        needed.update(each.name for each in kernels)
        return ahead(kernels, cores, on_compile)

    monkeypatch.setattr(load, "begin", lambda kernels, _: begun.update(each.name for each in kernels))
    monkeypatch.setattr(load, "CompileAhead", noted)
    begin_compiling(config)
    LLM(tmp_path / "tiny.gguf", config=config).close()
    assert len(begun) > 10
    assert begun <= needed


def test_a_load_that_fails_compiles_no_more(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_COMMAND", ("/none/such",))
    ahead = CompileAhead([squares, threads.exchange], 0, pytest.fail)
    with pytest.raises(ZeroDivisionError), ahead:
        raise ZeroDivisionError
    assert ahead._names.empty()


def test_names_say_how_kernels_are_made() -> None:
    for made in kernels_of_kind(INSTRUCTION_SETS[index_of("avx2")]):
        again = make_kernel(made.name)
        assert again.name == made.name
        assert again._function.__code__ is made._function.__code__


def test_the_wheel_has_every_kernel() -> None:
    """Of each function that makes some, and each kernel that needs no constants, for all kinds."""
    for kind in KINDS:
        names = [made.name for made in kernels_of_kind(kind)]
        assert len(names) == len(set(names))
        found = {tuple(name.split()[:2]) for name in names}
        for module in [sys.modules[f"realizar.backends.cpu.{module}"] for module, _ in found]:
            for value in vars(module).values():
                if getattr(value, "__module__", None) == module.__name__ and value.__name__.startswith("make_"):
                    assert (module.__name__.removeprefix("realizar.backends.cpu."), value.__name__) in found


@pytest.mark.parametrize(("bits", "name"), [(1 << 20 | 1 << 1, "neon_dot"), (1 << 1, "portable")])
def test_linux_says_what_an_arm_processor_has(bits: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM names none of it where it does not know the processor, as in an emulator."""
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", dict)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(instruction_set, "_hardware_bits", lambda: bits)
    assert instruction_set.select().name == name
    assert known_kind(instruction_set.host_features()) is (KINDS[-1] if name == "neon_dot" else None)


def test_kinds_of_processors_by_their_features() -> None:
    levels = [instruction_set._LEVELS[kind.processor] for kind in KINDS]
    everything = dict.fromkeys(
        {each for kind, level in zip(KINDS, levels, strict=True) for each in (*kind.features, *level)}, True
    )
    assert [kind.name for kind in KINDS] == ["avx512_vnni", "avx_vnni", "avx2", "neon_dot"]
    for at, kind in enumerate(KINDS):
        hidden = [feature for each in KINDS[:at] for feature in each.features[:1]]
        features = {**everything, **dict.fromkeys(hidden, False)}
        assert known_kind(features) is kind
        assert known_kind({**features, levels[at][-1]: False}) is not kind
    assert known_kind({**everything, "movbe": False}) is None
    assert known_kind({}) is None
