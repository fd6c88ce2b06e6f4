"""The files of a repository that make up one model."""

from __future__ import annotations

import pytest

from realizar.errors import HubError
from realizar.hub.names import parse_name
from realizar.hub.selection import quantization_of, select_files

GGUFS = (
    "README.md",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model-Q8_0.gguf",
    "model-f16.gguf",
    "mmproj-model-f16.gguf",
    "model.imatrix.gguf",
)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("model-Q4_K_M.gguf", "Q4_K_M"),
        ("Q5_K_S/model-Q5_K_S-00001-of-00002.gguf", "Q5_K_S"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model-IQ2_XXS.gguf", "IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model.bf16.gguf", "BF16"),
        ("qwen2-7b.gguf", None),
    ],
)
def test_quantization_is_read_from_the_name(name: str, quantization: str | None) -> None:
    assert quantization_of(name) == quantization


@pytest.mark.parametrize("wanted", ["Q4_K_M", "q4_k_m", "model-Q4_K_M.gguf"])
def test_a_quantization_or_a_file_name_picks_one(wanted: str) -> None:
    assert select_files("u/r", GGUFS, wanted) == ("model-Q4_K_M.gguf",)


def test_q4_k_m_is_not_confused_with_longer_names() -> None:
    names = ("a-IQ4_K_M.gguf", "a-Q4_K_M_L.gguf", "a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf")
    assert select_files("u/r", names, "Q4_K_M") == ("a-Q4_K_M.gguf",)


def test_projector_and_importance_files_are_no_models() -> None:
    assert select_files("u/r", GGUFS, "F16") == ("model-f16.gguf",)


def test_all_parts_of_a_split_file_come_in_order() -> None:
    parts = tuple(f"Q8_0/m-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3))
    assert select_files("u/r", ("m-Q4_0.gguf", parts[2], parts[0], parts[1]), "Q8_0") == parts


def test_a_missing_part_is_refused() -> None:
    with pytest.raises(HubError, match="3 parts"):
        select_files("u/r", ("m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"), "Q8_0")


def test_without_a_quantization_q4_k_m_comes_first_then_q8_0() -> None:
    assert select_files("u/r", GGUFS, None) == ("model-Q4_K_M.gguf",)
    assert select_files("u/r", ("m-Q8_0.gguf", "m-Q2_K.gguf"), None) == ("m-Q8_0.gguf",)
    assert select_files("u/r", ("only.gguf",), None) == ("only.gguf",)


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (GGUFS, "Q3_K_M", "has no file of Q3_K_M; it has: Q4_K_M, Q4_K_S, Q8_0, F16"),
        (("a-Q2_K.gguf", "b-Q3_K.gguf"), None, "has several models"),
        (("a-Q2_K.gguf", "b-Q2_K.gguf"), "Q2_K", "several"),
        (("config.json", "pytorch_model.bin"), None, "pickled"),
        (("README.md",), None, "neither"),
        (("model.safetensors",), None, r"config\.json"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_choices(
    names: tuple[str, ...], wanted: str | None, message: str
) -> None:
    with pytest.raises(HubError, match=message):
        select_files("u/r", names, wanted)


def test_safetensors_are_preferred_and_come_with_their_json_files() -> None:
    names = (
        "pytorch_model.bin",
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "modeling_x.py",
        "a-Q4_K_M.gguf",
    )
    assert select_files("u/r", names, None) == ("config.json", "model.safetensors", "tokenizer.json")


def test_shards_are_taken_and_other_exports_left() -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    names = (
        "config.json",
        "consolidated.safetensors",
        "model.safetensors.index.json",
        *shards,
        "onnx/model.safetensors",
    )
    assert select_files("u/r", names, None) == ("config.json", *shards, "model.safetensors.index.json")


def test_all_chat_templates_come() -> None:
    templates = ("additional_chat_templates/rag.jinja", "chat_template.jinja", "chat_template.json")
    names = ("config.json", "model.safetensors", *templates, "additional_chat_templates/x/y.jinja", "other/z.jinja")
    assert select_files("u/r", names, None) == ("config.json", "model.safetensors", *templates)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("user/repo", ("user/repo", None, None)),
        ("user/repo:Q4_K_M", ("user/repo", None, "Q4_K_M")),
        ("user/Repo-1.5B-GGUF@v1.0:Q8_0", ("user/Repo-1.5B-GGUF", "v1.0", "Q8_0")),
        ("user/repo:sub/file-Q8_0.gguf", ("user/repo", None, "sub/file-Q8_0.gguf")),
    ],
)
def test_names_are_taken_apart(name: str, parts: tuple[str, str | None, str | None]) -> None:
    parsed = parse_name(name)
    assert parsed is not None
    assert (parsed.repo, parsed.revision, parsed.wanted) == parts
    assert str(parsed) == name
    assert "/" not in parsed.folder_name


@pytest.mark.parametrize(
    "name",
    [
        *("", "repo", "a/b/c", "smollm2:135m", "user/", "user/repo:", "us er/repo", "user/repo\n"),
        *("user/repo@/srv/models", "user/repo@refs//x", "user/repo@x/", "user/repo@refs/../x", "user/repo@."),
        *("user/repo:/srv/m.gguf", "user/repo:../m.gguf", "user/..", "./repo"),
    ],
)
def test_other_names_are_not_repositories(name: str) -> None:
    assert parse_name(name) is None
