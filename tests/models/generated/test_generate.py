"""Generated models: real sizes and mixes, readable here and by the `gguf` package."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor
from realizar.checkpoint.open import open_checkpoint
from realizar.models.generated import generate
from realizar.models.generated.generate import generate_gguf
from realizar.models.generated.shapes import SHAPES
from realizar.models.mixers import GatedDeltaNet
from realizar.models.registry import build_next_token_block, build_spec
from realizar.models.spec import Experts, FeedForward
from realizar.quantization.convert import QUANTIZED_TYPES, dequantize

# As published with the models.
PARAMETERS = {
    "llama-8b": 8_030_261_248,
    "llama-1b": 1_235_814_400,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma4-26b-a4b": 25_233_142_046,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-8b-a1b": 8_339_929_856 + 22 * 32,  # biases of the choice of experts are not counted there
}
# Tensors of Q4_K and of Q6_K in llama.cpp's Q4_K_M files of these models.
MIX = {"llama-8b": (193, 33), "llama-1b": (96, 17), "qwen2.5-1.5b": (168, 29)}


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[NewTensor]]:
    """Record the header of each file by its stem, without making or writing any data."""
    written: dict[str, list[NewTensor]] = {}
    monkeypatch.setattr(generate, "write_gguf", lambda path, _, tensors: written.__setitem__(path.stem, tensors))
    return written


@pytest.mark.parametrize("shape", PARAMETERS)
def test_numbers_of_parameters(shape: str, headers: dict[str, list[NewTensor]]) -> None:
    generate_gguf(shape, Path("model.gguf"), "bf16")
    assert sum(math.prod(tensor.shape) for tensor in headers["model"]) == PARAMETERS[shape]


@pytest.mark.parametrize("shape", MIX)
def test_q4_k_m_mix(shape: str, headers: dict[str, list[NewTensor]]) -> None:
    generate_gguf(shape, Path("model.gguf"), "q4_k_m")
    types = Counter(tensor.ggml_type for tensor in headers["model"])
    assert set(types) == {GGMLType.F32, GGMLType.Q4_K, GGMLType.Q6_K}
    assert (types[GGMLType.Q4_K], types[GGMLType.Q6_K]) == MIX[shape]


@pytest.mark.parametrize("file_type", ["q4_k_m", "q8_0", "f16", "bf16", GGMLType.IQ2_XS])
def test_opens_here_and_with_gguf(tmp_path: Path, file_type: generate.FileType | GGMLType) -> None:
    path = tmp_path / "tiny.gguf"
    generate_gguf("tiny", path, file_type)
    checkpoint, oracle = open_checkpoint(path), gguf.GGUFReader(path)
    assert checkpoint.metadata["tokenizer.ggml.model"] == "no_vocab"
    assert [tensor.name for tensor in oracle.tensors] == list(checkpoint.tensors)
    for theirs in oracle.tensors:
        ours = checkpoint.tensors[theirs.name]
        assert ours.ggml_type == theirs.tensor_type
        assert ours.shape == tuple(int(size) for size in theirs.shape[::-1])
        assert np.array_equal(ours.data, np.asarray(theirs.data).view(np.uint8).reshape(-1))
    if isinstance(file_type, GGMLType):
        assert "general.file_type" not in checkpoint.metadata
    else:
        expected = gguf.LlamaFileType["MOSTLY_" + file_type.upper()]
        assert checkpoint.metadata["general.file_type"] == expected


def test_tensor_types_of_tiny(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    generate_gguf("tiny", path, "q4_k_m")
    types = {name: tensor.ggml_type.name for name, tensor in open_checkpoint(path).tensors.items()}
    assert types["token_embd.weight"] == "Q4_K"
    assert types["output.weight"] == "Q6_K"
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert [types[f"blk.{layer}.ffn_down.weight"] for layer in (0, 1)] == ["Q4_K", "Q6_K"]
    assert [types[f"blk.{layer}.attn_v.weight"] for layer in (0, 1)] == ["Q4_K", "Q6_K"]
    assert {types[f"blk.{layer}.ffn_up.weight"] for layer in (0, 1)} == {"Q4_K"}


@pytest.mark.parametrize("name", SHAPES)
def test_describes_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict loading finds every tensor, in the shape it expects, and none besides."""
    small = dataclasses.replace(
        SHAPES[name], num_layers=4, hidden_size=256, feed_forward_size=512, num_heads=4, num_kv_heads=2, vocab_size=64
    )
    if small.num_experts:
        small = dataclasses.replace(small, num_experts=4, experts_per_token=2, expert_size=512)
    if small.full_kv_heads:
        small = dataclasses.replace(small, full_kv_heads=1)
    monkeypatch.setitem(SHAPES, "small", small)
    generate_gguf("small", tmp_path / "small.gguf", "q8_0")
    checkpoint = open_checkpoint(tmp_path / "small.gguf")
    spec = build_spec(checkpoint)
    assert spec.architecture == small.architecture
    assert (build_next_token_block(checkpoint) is not None) == small.drafts
    assert spec.tied == small.tied
    assert spec.context_length == small.context_length
    attention = spec.attentions()[0][1]
    assert (attention.head_size, attention.num_kv_heads) == (small.head_size, 2)
    assert (attention.q.bias is not None) == (small.architecture in ("qwen2", "gpt-oss"))
    assert (attention.q_norm is not None) == (small.architecture not in ("llama", "qwen2", "gpt-oss"))
    assert (attention.gate is not None) == (small.architecture in ("qwen35", "qwen35moe"))
    part = spec.layers[-1].feed_forward
    assert isinstance(part, Experts if small.num_experts else FeedForward)


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda t: t.name)
def test_any_type(ggml_type: GGMLType, tmp_path: Path) -> None:
    """Weights of every type keep the size of what they multiply."""
    path = tmp_path / "tiny.gguf"
    generate_gguf("tiny", path, ggml_type)
    tensor = open_checkpoint(path).tensors["blk.1.ffn_down.weight"]
    assert tensor.ggml_type is ggml_type
    assert dequantize(ggml_type, tensor.data, 256, 512).std() == pytest.approx(512**-0.5, rel=0.05)


def test_mix_of_delta_nets(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    generate_gguf("tiny-delta", path, "q4_k_m")
    types = {name: tensor.type_name for name, tensor in open_checkpoint(path).tensors.items()}
    assert types["blk.0.attn_qkv.weight"] == "Q5_K"
    assert types["blk.3.attn_q.weight"] == types["blk.0.ssm_alpha.weight"] == types["blk.0.ssm_out.weight"] == "Q4_K"
    assert {types[f"blk.0.{name}"] for name in ("ssm_a", "ssm_conv1d.weight", "ssm_dt.bias")} == {"F32"}
    mixers = [layer.mixer for layer in build_spec(open_checkpoint(path)).layers]
    assert [isinstance(mixer, GatedDeltaNet) for mixer in mixers] == [True, True, True, False]


def test_types_of_experts(tmp_path: Path) -> None:
    """Routers are float32 and experts are mixed like dense matrices, as llama.cpp stores them."""
    generate_gguf("tiny-moe", tmp_path / "tiny.gguf", "q4_k_m")
    tensors = open_checkpoint(tmp_path / "tiny.gguf").tensors
    assert {tensors[f"blk.{layer}.ffn_gate_inp.weight"].type_name for layer in (0, 1)} == {"F32"}
    assert [tensors[f"blk.{layer}.ffn_down_exps.weight"].type_name for layer in (0, 1)] == ["Q4_K", "Q6_K"]
    assert tensors["blk.1.ffn_up_exps.weight"].shape == (8, 256, 256)
    embedding = tensors["token_embd.weight"]
    assert dequantize(embedding.ggml_type, embedding.data, 512, 256).std() == pytest.approx(10, rel=0.05)


def test_a_header_has_the_tables_that_a_spec_reads(tmp_path: Path) -> None:
    """Gemma 4's full layers rotate a quarter of each head, which a tensor says."""
    spec = build_spec(generate.generated_header("gemma4-26b-a4b"))
    attentions = [attention for _, attention in spec.attentions()]
    assert [(a.head_size, a.num_kv_heads, a.window) for a in attentions[4:6]] == [(256, 8, 1024), (512, 2, None)]
    assert [np.count_nonzero(np.array(a.rope.inverse_frequencies) > 1e-20) for a in attentions[4:6]] == [128, 64]
    experts = spec.mixtures()[0][1]
    assert (experts.num_experts, experts.experts_per_token, experts.up.out_features) == (128, 8, 704)


def test_seeds(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        generate_gguf("tiny", tmp_path / name, "q4_k_m", seed=seed)
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again != other


def test_memory_holds_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPES["tiny"], num_layers=32, hidden_size=1024, feed_forward_size=1024)
    monkeypatch.setitem(SHAPES, "deep", shape)
    generate_gguf("tiny", tmp_path / "first.gguf", "q8_0")  # what is measured once per type and kept
    tracemalloc.start()
    generate_gguf("deep", tmp_path / "deep.gguf", "q8_0")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = 1024 * 1024 * 34 // 32
    assert peak < 6 * largest < (tmp_path / "deep.gguf").stat().st_size / 10


def test_unknown_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama-1b"):
        generate_gguf("llama-3b", tmp_path / "x.gguf", "q8_0")
    assert not (tmp_path / "x.gguf").exists()


def test_rows_that_are_not_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "odd", dataclasses.replace(SHAPES["tiny"], feed_forward_size=336))
    with pytest.raises(ValueError, match="336 weights are not whole Q5_0"):
        generate_gguf("odd", tmp_path / "x.gguf", "q4_k_m")


def test_rows_of_whole_small_blocks_get_types_of_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's quantiser chooses them."""
    monkeypatch.setitem(SHAPES, "odd", dataclasses.replace(SHAPES["tiny"], feed_forward_size=320))
    generate_gguf("odd", tmp_path / "x.gguf", "q4_k_m")
    types = {name: tensor.type_name for name, tensor in open_checkpoint(tmp_path / "x.gguf").tensors.items()}
    assert [types[f"blk.{layer}.ffn_down.weight"] for layer in (0, 1)] == ["Q5_0", "Q8_0"]
    assert types["blk.0.ffn_up.weight"] == "Q4_K"
