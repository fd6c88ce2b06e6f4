"""The files beside safetensors weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.checkpoint.file_json import parse_json_object
from realizar.checkpoint.hf_config import MAX_TEMPLATE_BYTES, read_folder_metadata, refuse_remote_code
from realizar.errors import CheckpointError, UnsupportedModelError


def test_reads_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_theta": 1e6}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {}}')
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}\r\nnäh\n", newline="")
    assert read_folder_metadata(tmp_path) == {
        "config": {"model_type": "llama", "rope_theta": 1e6},
        "generation_config": {"eos_token_id": [1, 2]},
        "hf_quant_config": {"quantization": {}},
        "tokenizer_config": {"add_bos_token": True, "chat_template": "old"},
        "chat_templates": {"default": "{{ bos_token }}\r\nnäh\n"},
    }


def test_empty_folder(tmp_path: Path) -> None:
    assert read_folder_metadata(tmp_path) == {}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize(
    ("value", "templates"),
    [
        ("text", {"default": "text"}),
        ("", {"default": ""}),
        (
            [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
            {"tool_use": "T", "default": "D"},
        ),
        ([{"name": "rag", "template": "R"}], {"rag": "R"}),
        ({"default": "D"}, {"default": "D"}),
        (None, None),
    ],
)
def test_templates_in_json(tmp_path: Path, name: str, value: object, templates: object) -> None:
    (tmp_path / name).write_text(json.dumps({"chat_template": value}))
    assert read_folder_metadata(tmp_path).get("chat_templates") == templates


def test_the_tokenizers_template_comes_before_the_processors(tmp_path: Path) -> None:
    for name, text in (("tokenizer_config.json", "T"), ("chat_template.json", "P")):
        (tmp_path / name).write_text(json.dumps({"chat_template": text}))
    assert read_folder_metadata(tmp_path)["chat_templates"] == {"default": "T"}


@pytest.mark.parametrize("with_default", [False, True])
def test_templates_in_files_replace_those_in_json(tmp_path: Path, *, with_default: bool) -> None:
    listed = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    if with_default:
        (tmp_path / "chat_template.jinja").write_text("D")
    expected = {"rag": "R", "default": "D"} if with_default else {"rag": "R"}
    assert read_folder_metadata(tmp_path)["chat_templates"] == expected


def test_a_folder_with_many_templates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for number in range(17):
        (tmp_path / "additional_chat_templates" / f"{number}.jinja").touch()
    with pytest.raises(CheckpointError, match="additional_chat_templates: files: more than 16"):
        read_folder_metadata(tmp_path)


@pytest.mark.parametrize("value", [7, {"a": 1}, [{"name": "default", "template": 3}]])
def test_template_that_is_no_text(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: key 'chat_template': is not text"):
        read_folder_metadata(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "offset 0: bad JSON"),
        (b'{"a": 1', "offset 7: bad JSON"),
        (b"[1]", "not an object"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
        (b'{"\xe9": 1}', "offset 2: the JSON is not valid UTF-8"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b" " * ((16 << 20) + 1), "exceeds its limit"),
    ],
    ids=["empty", "cut", "list", "nan", "duplicate", "utf-8", "deep", "large"],
)
def test_bad_json_is_refused(tmp_path: Path, name: str, text: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(CheckpointError) as refusal:
        read_folder_metadata(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path / name}: ")
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" * (MAX_TEMPLATE_BYTES + 1), "exceeds its limit of 1048576 bytes"),
        (b"ab\xff", "offset 2: the template is not"),
    ],
    ids=["large", "utf-8"],
)
def test_bad_template_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        read_folder_metadata(tmp_path)


@given(data=st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]",:0123456789eE+-.\\utrfalsn \n', max_size=60)))
def test_any_bytes_parse_or_are_refused(data: bytes | str) -> None:
    raw = data if isinstance(data, bytes) else data.encode()
    for text in (raw, b'{"a":' + raw + b"}"):
        try:
            value = parse_json_object(Path("config.json"), text)
        except CheckpointError as error:
            assert str(error).startswith("config.json: offset ")  # noqa: PT017 - both outcomes are allowed
        else:
            assert value == json.loads(text)


def test_config_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: file: not a regular file"):
        read_folder_metadata(tmp_path)


@pytest.mark.parametrize(
    "auto_map", [{"AutoModelForCausalLM": "modeling_x.X"}, {"AutoConfig": "modeling_x.X"}, "modeling_x.X"]
)
def test_remote_code_is_refused_by_name(auto_map: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'strange' needs code .*modeling_x\.X"):
        refuse_remote_code({"model_type": "strange", "auto_map": auto_map}, {"llama"})


def test_known_models_need_no_remote_code() -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    refuse_remote_code({"model_type": "phi3", "auto_map": auto_map}, {"phi3"})
    refuse_remote_code({"model_type": "strange"}, {"phi3"})
