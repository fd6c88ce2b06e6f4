"""The files of a repository that make up one model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from realizar.errors import HubError
from realizar.gguf_names import quantization_of
from realizar.hub.names import parse_name
from realizar.hub.selection import select_files

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


def chosen(names: Iterable[str], wanted: str | None) -> tuple[str, ...]:
    return select_files("u/r", dict.fromkeys(names), wanted)


@pytest.mark.parametrize("wanted", ["Q4_K_M", "q4_k_m", "model-Q4_K_M.gguf"])
def test_a_quantization_or_a_file_name_picks_one(wanted: str) -> None:
    assert chosen(GGUFS, wanted)[0] == "model-Q4_K_M.gguf"


def test_q4_k_m_is_not_confused_with_longer_names() -> None:
    names = ("a-IQ4_K_M.gguf", "a-Q4_K_M_L.gguf", "a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf")
    assert chosen(names, "Q4_K_M") == ("a-Q4_K_M.gguf",)


def test_projector_and_importance_files_are_no_models() -> None:
    assert chosen(GGUFS, "F16") == ("model-f16.gguf", "mmproj-model-f16.gguf")


@pytest.mark.parametrize(
    ("wanted", "beside", "others"),
    [
        # in F16 where there is one; other towers and drafters of other kinds stay
        ("Q4_K_M", ["mmproj-F16.gguf"], ["mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-Q8_0.gguf"]),
        ("Q4_K_M", ["mmproj-BF16.gguf"], ["mmproj-Q8_0.gguf", "mmproj-Q4_K_M.gguf"]),
        ("Q4_K_M", ["tiny-7b-mmproj.gguf"], []),
        # of the model's quantisation, then in Q8_0
        ("Q4_K_M", ["mtp-tiny-7b-Q4_K_M.gguf"], ["mtp-tiny-7b-Q8_0.gguf", "mtp-tiny-7b-BF16.gguf"]),
        ("Q4_K_M", ["mtp-tiny-7b-Q8_0.gguf"], ["mtp-tiny-7b-BF16.gguf", "tiny-7b-eagle3-Q4_K_M.gguf"]),
        ("Q4_K_M", ["tiny-7b-assistant-BF16.gguf"], ["tiny-7b-DFlash-Q8_0.gguf"]),
        ("Q4_K_M", ["Tiny_7B_EAGLE-3.gguf"], []),
        ("Q4_K_M", ["dflash-tiny-7b.gguf"], []),
        # both, and the parts of one in several files
        (
            "Q4_K_M",
            ["mmproj-F16.gguf", "mtp-tiny-7b-00001-of-00002.gguf", "mtp-tiny-7b-00002-of-00002.gguf"],
            [],
        ),
        # in the model's folder, or above it
        ("Q8_0", ["Q8_0/mmproj-BF16.gguf", "mtp-tiny-7b.gguf"], ["mmproj-F16.gguf", "other/mtp-tiny-7b-Q8_0.gguf"]),
        # the one that names the model, and none that names two others
        ("Q4_K_M", ["mmproj-tiny-7b-Q8_0.gguf"], ["mmproj-F16.gguf", "mmproj-tiny-9b-F16.gguf"]),
        ("Q4_K_M", [], ["mmproj-tiny-2b-F16.gguf", "mmproj-tiny-9b-F16.gguf", "mtp-tiny-2b.gguf", "mtp-tiny-9b.gguf"]),
        ("Q4_K_M", ["mmproj-TinySevenB-F16.gguf"], []),
    ],
)
def test_a_tower_and_a_drafter_that_lie_beside_a_model_come_with_it(
    wanted: str, beside: list[str], others: list[str]
) -> None:
    models = ["tiny-7b-Q4_K_M.gguf", "Q8_0/tiny-7b-Q8_0-00001-of-00001.gguf"]
    model = models[wanted == "Q8_0"]
    assert chosen([*models, *others, *beside], wanted) == (model, *beside)
    assert chosen(reversed([*models, *others, *beside]), wanted) == (model, *beside)


def test_what_lies_beside_a_model_comes_alone_where_it_is_named() -> None:
    names = ("m-Q4_K_M.gguf", "mmproj-F16.gguf", "mtp-m-Q4_K_M.gguf")
    for name in names[1:]:
        assert chosen(names, name) == (name,)


def test_a_repository_of_drafters_has_models_to_choose_from() -> None:
    names = ("m-eagle3-Q4_K_M.gguf", "m-eagle3-Q8_0.gguf")
    assert chosen(names, None) == names[:1]
    assert chosen(names, "Q8_0") == names[1:]
    assistants = ("an-assistant-Q4_K_M.gguf", "an-assistant-Q8_0.gguf", "mmproj-F16.gguf")
    assert chosen(assistants, "Q8_0") == assistants[1:], "which name their model so"


def test_a_name_that_ends_in_mtp_is_a_models_with_its_block() -> None:
    assert chosen(("m-Q4_K_M-mtp.gguf", "m-mtp-Q8_0.gguf"), "Q8_0") == ("m-mtp-Q8_0.gguf",)


def test_all_parts_of_a_split_file_come_in_order() -> None:
    parts = tuple(f"Q8_0/m-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3))
    assert chosen(("m-Q4_0.gguf", parts[2], parts[0], parts[1]), "Q8_0") == parts


def test_a_missing_part_is_refused() -> None:
    with pytest.raises(HubError, match="3 parts"):
        chosen(("m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"), "Q8_0")


def test_without_a_quantization_q4_k_m_comes_first_then_q8_0() -> None:
    assert chosen(GGUFS, None)[0] == "model-Q4_K_M.gguf"
    assert chosen(("m-Q8_0.gguf", "m-Q2_K.gguf"), None) == ("m-Q8_0.gguf",)
    assert chosen(("only.gguf",), None) == ("only.gguf",)


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
        chosen(names, wanted)


SIZES = {"m-Q2_K.gguf": 3 * 10**9, "m-Q4_K_M.gguf": 5 * 10**9, "m-Q4_K_S.gguf": 4 * 10**9, "m-Q8_0.gguf": 8 * 10**9}


@pytest.mark.parametrize(
    ("free", "file"),
    [(10**11, "m-Q4_K_M.gguf"), (6_000_000_000, "m-Q4_K_M.gguf"), (5_999_999_999, "m-Q4_K_S.gguf"),
     (4 * 10**9, "m-Q2_K.gguf")],
)  # fmt: skip
def test_the_first_choice_that_fits_is_taken_and_said(free: int, file: str, caplog: pytest.LogCaptureFixture) -> None:
    assert select_files("u/r", SIZES, None, lambda: free) == (file,)
    (line,) = caplog.messages
    assert line.startswith(f"u/r has 4 models: {quantization_of(file)} is taken (")


def test_an_encoder_of_images_takes_room_too() -> None:
    sizes = {**SIZES, "mmproj-F16.gguf": 10**9, "mmproj-F32.gguf": 2 * 10**9}
    for free, file in ((7 * 10**9, "m-Q4_K_M.gguf"), (7 * 10**9 - 1, "m-Q4_K_S.gguf")):
        assert select_files("u/r", sizes, None, partial(int, free)) == (file, "mmproj-F16.gguf")


def test_room_is_asked_for_only_where_there_is_a_choice(caplog: pytest.LogCaptureFixture) -> None:
    def never() -> int:
        raise AssertionError

    assert select_files("u/r", SIZES, "q8_0", never) == ("m-Q8_0.gguf",)
    assert select_files("u/r", {"only.gguf": 1}, None, never) == ("only.gguf",)
    assert select_files("u/r", {"config.json": 1, "model.safetensors": 1}, None, never)
    with pytest.raises(HubError, match="has several models"):
        select_files("u/r", {"a-Q2_K.gguf": 1, "b-Q3_K.gguf": 1}, None, never)
    assert not caplog.messages


def test_encoders_of_images_are_left_where_none_is_wanted() -> None:
    """Nor do they take room; one that is named is a file as any other."""
    sizes = {**SIZES, "mmproj-F16.gguf": 10**9, "mtp-m.gguf": 1}
    room = partial(int, int(1.1 * SIZES["m-Q4_K_M.gguf"]) + 500_000_001)
    assert select_files("u/r", sizes, None, room, towers=False) == ("m-Q4_K_M.gguf", "mtp-m.gguf")
    assert select_files("u/r", sizes, None, room)[0] != "m-Q4_K_M.gguf"
    assert select_files("u/r", sizes, "mmproj-F16.gguf", towers=False) == ("mmproj-F16.gguf",)


def test_where_no_model_fits_the_smallest_is_named() -> None:
    with pytest.raises(HubError, match=r"none of its 4 models fits into the 3.00 GB that are free; Q2_K has 3.00 GB"):
        select_files("u/r", SIZES, None, lambda: 3 * 10**9)


def test_parts_count_together() -> None:
    sizes = {"m-Q4_K_M-00001-of-00002.gguf": 4 * 10**9, "m-Q4_K_M-00002-of-00002.gguf": 4 * 10**9, **SIZES}
    del sizes["m-Q4_K_M.gguf"]
    assert select_files("u/r", sizes, None, lambda: 9 * 10**9) == ("m-Q4_K_S.gguf",)
    assert len(select_files("u/r", sizes, None, lambda: 10**10)) == 2


def test_safetensors_are_preferred_and_come_with_their_json_files() -> None:
    names = (
        "pytorch_model.bin",
        "model.safetensors",
        "config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "modeling_x.py",
        "a-Q4_K_M.gguf",
    )
    assert chosen(names, None) == ("config.json", "model.safetensors", "hf_quant_config.json", "tokenizer.json")


def test_shards_are_taken_and_other_exports_left() -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    names = (
        "config.json",
        "consolidated.safetensors",
        "model.safetensors.index.json",
        *shards,
        "onnx/model.safetensors",
    )
    assert chosen(names, None) == ("config.json", *shards, "model.safetensors.index.json")


def test_a_next_token_block_in_a_shard_of_its_own_comes() -> None:
    names = ("config.json", "model-00001-of-00001.safetensors", "mtp.safetensors", "model.safetensors.index.json")
    assert chosen(names, None) == names


def test_all_chat_templates_come() -> None:
    templates = ("additional_chat_templates/rag.jinja", "chat_template.jinja", "chat_template.json")
    names = ("config.json", "model.safetensors", *templates, "additional_chat_templates/x/y.jinja", "other/z.jinja")
    assert chosen(names, None) == ("config.json", "model.safetensors", *templates)


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
    ("address", "name"),
    [
        ("hf.co/user/repo:Q4_K_M", "user/repo:Q4_K_M"),
        ("hf.co/user/repo", "user/repo"),
        ("hf.co/user/repo:latest", "user/repo"),
        ("hf.co/user/repo@v1.0:Q8_0", "user/repo@v1.0:Q8_0"),
        ("https://huggingface.co/user/Repo-1.5B-GGUF", "user/Repo-1.5B-GGUF"),
        ("https://huggingface.co/user/repo/", "user/repo"),
        ("HTTPS://HuggingFace.co/user/repo?show_file_info=m.gguf#files", "user/repo"),
        ("https://huggingface.co/user/repo/tree/main", "user/repo"),
        ("https://huggingface.co/user/repo/tree/v2", "user/repo@v2"),
        ("https://huggingface.co/user/repo/tree/main/Q8_0", "user/repo:Q8_0"),
        ("https://huggingface.co/user/repo/blob/main/sub/m-Q8_0.gguf", "user/repo:sub/m-Q8_0.gguf"),
        ("https://huggingface.co/user/repo/resolve/main/m%20a.gguf?download=true", "user/repo:m a.gguf"),
        ("https://huggingface.co/user/repo/blob/v2/model-00001-of-00002.safetensors", "user/repo@v2"),
        ("https://huggingface.co/user/repo/resolve/refs%2Fpr%2F1/m.gguf", "user/repo@refs/pr/1:m.gguf"),
        ("https://huggingface.co/user/repo/discussions/3#65f0", "user/repo"),
        ("https://huggingface.co/user/repo/commits/main", "user/repo"),
        ("https://huggingface.co/user/repo.git", "user/repo"),
        (" https://huggingface.co/user/repo\n", "user/repo"),
        ("hf://user/repo:Q4_K_M", "user/repo:Q4_K_M"),
        ("http://127.0.0.1:8080/user/repo:Q4_0", "user/repo:Q4_0"),
    ],
)
def test_addresses_of_pages_are_names(monkeypatch: pytest.MonkeyPatch, address: str, name: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:8080")
    parsed = parse_name(address)
    assert parsed is not None
    assert str(parsed) == name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "hf.co",
            "hf.co/",
            "hf.co/user",
            "hf.co/user/..",
            "hf.co/user/repo/settings",
            "https://elsewhere.org/user/repo",
        ),
        *("https://huggingface.co/user/repo/blob/main/../../x.gguf", "https://huggingface.co/spaces/user/repo"),
        *("https://huggingface.co/datasets/user/repo", "https://huggingface.co/user/discussions/3", "hf://user"),
        *("", "repo", "a/b/c", "smollm2:135m", "user/", "user/repo:", "us er/repo", "user/repo\n"),
        *("user/repo@/srv/models", "user/repo@refs//x", "user/repo@x/", "user/repo@refs/../x", "user/repo@."),
        *("user/repo:/srv/m.gguf", "user/repo:../m.gguf", "user/..", "./repo"),
    ],
)
def test_other_names_are_not_repositories(name: str) -> None:
    assert parse_name(name) is None
