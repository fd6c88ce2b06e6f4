"""The comparison with peers, with programs that answer at once in the peers' place."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from peers.compare import IK, IK_REPACKED, LLAMACPP, OURS, PeerModel, PeerResults, Row, compare, read_model
from peers.report import as_markdown, as_record
from peers.roofline import roofline_svg
from peers.runs import Speeds, Workload, compiling_for, run_ik, run_llamacpp, run_realizar
from peers.tools import PeerTools, find_tools

from realizar.backends.bandwidth import read_bandwidth
from realizar.backends.machine import Machine, read_machine
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import CapacityError, HubError
from realizar.models.generated.generate import generate_gguf

WORK = Workload(prompt_tokens=512, gen_tokens=64, repeats=3)


def script(path: Path, body: str) -> Path:
    """An executable in Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


LLAMA_BENCH = """
import json, pathlib, sys
arguments = sys.argv[1:]
pathlib.Path(__file__).with_name("seen").open("a").write(" ".join(arguments) + "\\n")
if "-d" in arguments:
    print(json.dumps([{"samples_ts": [10.0, 30.0, 20.0]}]))
else:
    print(json.dumps([{"samples_ts": [100.0, 300.0, 200.0]}]))
"""


@pytest.fixture
def tools(tmp_path: Path) -> PeerTools:
    return PeerTools(script(tmp_path / "bin/llama-bench", LLAMA_BENCH), None)


def row(**changes: object) -> Row:
    fields: dict[str, object] = {
        "model": "a <model>",
        "size_bytes": 500_000_000,
        "threads": 2,
        "limit_gb_per_s": 50.0,
        "prefill": {LLAMACPP: 100.0, IK: 400.0, OURS: 300.0},
        "decode": {LLAMACPP: 40.0, IK: 50.0, IK_REPACKED: 75.0, OURS: 60.0},
    }
    return Row(**(fields | changes))  # type: ignore[arg-type]


def test_llama_bench_is_called_as_its_users_call_it(tools: PeerTools) -> None:
    assert run_llamacpp(tools, Path("m.gguf"), 2, WORK) == Speeds(prefill=200.0, decode=20.0)
    seen = tools.llama_bench.with_name("seen").read_text().splitlines()
    assert seen == ["-m m.gguf -t 2 -r 3 -o json -p 512 -n 0", "-m m.gguf -t 2 -r 3 -o json -p 0 -n 64 -d 512"]


def test_a_failing_program_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    broken = script(tmp_path / "llama-bench", "import sys; sys.exit('no such model\\n')")
    with pytest.raises(CapacityError, match="ended with 1: no such model"):
        run_llamacpp(PeerTools(broken, None), Path("m.gguf"), 2, WORK)


def test_ik_goes_on_without_flash_attention_where_that_aborts(tmp_path: Path) -> None:
    speeds = '{"prefill": [3, 1, 2], "decode": [5]}'
    body = f"import sys\nif sys.argv[-1] == '1': sys.exit('abort')\nprint('noise')\nprint({speeds!r})"
    assert run_ik(script(tmp_path / "python", body), Path("m.gguf"), 1, WORK, repack=True) == Speeds(2, 5)


@pytest.mark.parametrize(
    ("forced", "options", "processor"), [(None, [], None), ("avx2", ["--instruction-set", "avx2"], "x86-64-v3")]
)
def test_realizar_is_called_with_the_instruction_set(
    monkeypatch: pytest.MonkeyPatch, forced: str | None, options: list[str], processor: str | None
) -> None:
    seen: list[str] = []
    surroundings: list[dict[str, str]] = []

    def output(command: list[str], environment: dict[str, str] | None) -> str:
        seen.extend(command)
        surroundings.append(environment or {})
        return '{"results": [{"prefill_tokens_per_s": {"median": 2}, "decode_tokens_per_s": {"median": 1}}]}'

    monkeypatch.setattr("peers.runs._output", output)
    work = Workload(prompt_tokens=7, gen_tokens=5, repeats=3, instruction_set=forced)
    assert run_realizar(Path("m.gguf"), 2, work) == Speeds(prefill=2, decode=1)
    assert seen[seen.index("--json") + 1 :] == options
    assert surroundings[0].get("NUMBA_CPU_NAME") == processor


def test_a_forced_instruction_set_leaves_no_wider_code() -> None:
    """In a run's environment Numba compiles code without vectors wider than AVX2's and without their registers."""
    host = pytest.importorskip("llvmlite.binding").get_host_cpu_features()
    if not host.get("avx2", False):
        pytest.skip("this processor has no AVX2")
    program = (
        "import numpy as np; from numba import njit\n"
        "f = njit(fastmath=True)(lambda x: (x * x + 1).sum()); f(np.ones(99, np.float32))\n"
        "print(*f.inspect_asm().values())"
    )
    environment = compiling_for("avx2")
    text = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"%ymm\d", text.stdout)
    assert not re.search(r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k[1-7]", text.stdout)


def test_ratios_and_shares() -> None:
    one = row()
    assert one.ratio(one.decode, LLAMACPP) == 1.5
    assert one.best_ik(one.decode) == 60 / 75
    assert one.best_ik(one.prefill) == 0.75
    assert one.achieved_gb_per_s(OURS) == 30.0
    assert one.share_of_limit() == 0.6
    without = row(decode={LLAMACPP: 40.0})
    assert without.ratio(without.decode, LLAMACPP) is None
    assert without.share_of_limit() is None
    assert without.best_ik(without.decode) is None


def test_programs_take_turns_and_medians_are_taken_over_rounds(
    tools: PeerTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    speeds = iter([Speeds(1.0, 10.0), Speeds(9.0, 90.0), Speeds(5.0, 50.0)])

    def ours(model: Path, threads: int, work: Workload) -> Speeds:
        order.append(OURS)
        return next(speeds)

    def theirs(tools: PeerTools, model: Path, threads: int, work: Workload) -> Speeds:
        order.append(LLAMACPP)
        return Speeds(2.0, 20.0)

    monkeypatch.setattr("peers.compare.run_realizar", ours)
    monkeypatch.setattr("peers.compare.run_llamacpp", theirs)
    monkeypatch.setattr("peers.compare.read_bandwidth", lambda threads: 40.0)
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(1000))
    results = compare(tools, [PeerModel("m", file, 1000)], [2], WORK, 3, log=lambda _: None)
    assert order == [LLAMACPP, OURS] * 3
    assert results.rows == (Row("m", 1000, 2, 40.0, {LLAMACPP: 2.0, OURS: 5.0}, {LLAMACPP: 20.0, OURS: 50.0}),)


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_experts_that_a_token_does_not_go_through_are_not_read(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    generate_gguf(shape, path, "q4_k_m")
    checkpoint = open_checkpoint(path)
    experts, used = (checkpoint.metadata.get(f"qwen3moe.expert_{key}", 1) for key in ("count", "used_count"))
    stacks = sum(tensor.size_bytes for name, tensor in checkpoint.tensors.items() if "_exps." in name)
    assert (stacks > 0) == (shape == "tiny-moe")
    assert read_model("m", path).size_bytes == path.stat().st_size - stacks // experts * (experts - used)


def test_a_program_that_fails_is_left_out_and_reported(
    tools: PeerTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ours(model: Path, threads: int, work: Workload) -> Speeds:
        raise CapacityError("too large")

    monkeypatch.setattr("peers.compare.run_realizar", ours)
    monkeypatch.setattr("peers.compare.read_bandwidth", lambda threads: 40.0)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    results = compare(tools, [PeerModel("m", file, 1000)], [1], WORK, 2, log=lambda _: None)
    assert results.rows[0].decode == {LLAMACPP: 20.0}
    assert results.failures == ("m, 1 threads, realizar: too large",)
    assert "too large" in as_markdown(results)


def test_report_has_the_ratios_and_the_share() -> None:
    machine = Machine("A Processor", 8, 16, {"L3": 1 << 20}, 1 << 30, 1 << 29)
    results = PeerResults(machine, WORK, 3, (row(),))
    text = as_markdown(results)
    assert "| a <model> | 2 | 40.0 | 75.0 | 60.0 | 1.50x | 0.80x | 30.0 | 50.0 | 60% |" in text
    assert "| a <model> | 2 | 100.0 | 400.0 | 300.0 | 3.00x | 0.75x |" in text
    assert "A Processor, 8 physical cores" in text
    record = json.loads(json.dumps(as_record(results)))
    assert record["rows"][0]["ratios"]["decode_llama_cpp"] == 1.5
    assert record["rows"][0]["share_of_limit"] == 0.6
    assert record["machine"]["physical_cores"] == 8


def test_picture_is_svg_whose_bars_are_to_scale() -> None:
    root = ET.fromstring(roofline_svg([row(), row(threads=1, decode={LLAMACPP: 20.0})], "bytes & speed"))
    namespace = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{namespace}text")]
    assert "bytes & speed" in texts
    assert texts.count("a <model>") == 2
    assert "30.0" in texts
    heights = {
        rect.get("class"): float(rect.get("height", 0))
        for rect in list(root.iter(f"{namespace}rect"))[4:7]  # after background and legend: the first group
    }
    assert heights["first"] / heights["third"] == pytest.approx(60 / 40, rel=0.01)
    assert heights["second"] / heights["third"] == pytest.approx(75 / 40, rel=0.01)


@pytest.mark.parametrize("decode", [96.0, 98.0, 99.0, 100.0, 101.0, 103.0])
def test_the_limit_goes_through_no_number(decode: float) -> None:
    root = ET.fromstring(roofline_svg([row(decode={OURS: decode})], "near the limit of 50"))
    namespace = "{http://www.w3.org/2000/svg}"
    (number,) = (float(each.get("y", 0)) for each in root.iter(f"{namespace}text") if each.text == f"{decode / 2:.1f}")
    limit = [float(each.get("y1", 0)) for each in root.iter(f"{namespace}line") if each.get("stroke-width") == "2"][1]
    assert not number - 8 <= limit <= number + 1, "digits are eight high"


def test_pictures_follow_the_readers_light_or_dark() -> None:
    root = ET.fromstring(roofline_svg([row()], "bytes"))
    colours = ("fill", "stroke")
    assert [name for each in root.iter() for name in colours if each.get(name)] == [], "all colours are of the style"
    style = root.findtext("{http://www.w3.org/2000/svg}style", "")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    used = {name for each in root.iter() for name in (each.get("class") or "").split()}
    assert used >= {"page", "line-grid", "line-ink", "muted", "first"}
    assert all(f".{name}{{" in half for name in used for half in (light, dark))


@pytest.mark.parametrize("threads", [1, 3])
def test_read_bandwidth_is_that_of_memory(threads: int) -> None:
    for size in (1, 1 << 20, (1 << 26) + 8):
        assert 0.01 < read_bandwidth(threads, size_bytes=size, passes=2) < 100_000


def test_tools_are_found_where_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = script(tmp_path / "llama-bench", LLAMA_BENCH)
    environment = tmp_path / "environment"
    script(environment / "bin/python", "")
    assert find_tools(named, environment) == PeerTools(named, environment / "bin/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tools(None, environment).llama_bench == named
    with pytest.raises(HubError, match="not found"):
        find_tools(tmp_path / "nonesuch", environment)


def test_machine_is_read() -> None:
    machine = read_machine()
    assert 1 <= machine.physical_cores <= machine.logical_cores
    assert 0 < machine.available_bytes <= machine.memory_bytes
