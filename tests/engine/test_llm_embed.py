"""`LLM.embed`, and what else callers of vLLM type, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realizar import LLM, SamplingParams
from realizar.errors import EngineDeadError, InvalidRequestError
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from tiny_model import write_tiny_model

TEXTS = ["a cat", "the quick brown fox jumps over the lazy dog", "x", "a cat"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, context_length=256, max_running=3, max_step_tokens=7) as model:
        yield model


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_have_unit_length_and_their_place(llm: LLM, pooling: Any) -> None:
    vectors = llm.embed(TEXTS, pooling=pooling)
    assert (vectors.shape, vectors.dtype) == ((4, llm.spec.hidden_size), np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    for row, text in zip(vectors, TEXTS, strict=True):
        np.testing.assert_array_equal(llm.embed(text, pooling=pooling)[0], row)
    assert not np.array_equal(vectors[0], vectors[1])
    ids = llm.tokenizer.encode(TEXTS[1])
    np.testing.assert_array_equal(llm.embed(ids, pooling=pooling)[0], vectors[1])


def test_vectors_are_those_of_the_specification(llm: LLM) -> None:
    reference = ReferenceModel(llm.spec, load_tensors(llm.spec, llm.checkpoint), np.float64)
    hidden = reference.hidden(llm.tokenizer.encode(TEXTS[1]))
    for pooling, wanted in (("mean", hidden.mean(axis=0)), ("last", hidden[-1])):
        cosine = llm.embed(TEXTS[1], pooling=pooling)[0] @ (wanted / np.linalg.norm(wanted))  # type: ignore[arg-type]
        assert cosine > 0.995, pooling


def test_both_poolings_are_one_for_one_token(llm: LLM) -> None:
    ids = [[llm.tokenizer.encode("x")[-1]]]
    np.testing.assert_allclose(llm.embed(ids, pooling="mean"), llm.embed(ids, pooling="last"), atol=1e-6)
    assert not np.allclose(llm.embed(TEXTS[1], pooling="mean"), llm.embed(TEXTS[1], pooling="last"), atol=1e-3)


def test_no_prompt_gives_no_vector(llm: LLM) -> None:
    assert llm.embed([], pooling="mean").shape == (0, llm.spec.hidden_size)


def test_a_model_that_was_not_made_for_it_says_so(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="not made for embeddings; pooling='mean'"):
        llm.embed("x")
    with pytest.raises(InvalidRequestError, match="must be 'mean' or 'last', not 'cls'"):
        llm.embed("x", pooling="cls")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.embed(7, pooling="mean")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.embed(["x", []], pooling="mean")


def test_use_tqdm_is_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=2)
    llm.generate(TEXTS, params, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(TEXTS, params, use_tqdm=True)
    assert "4 of 4 prompts" in capsys.readouterr().err
    llm.embed(TEXTS, pooling="mean", use_tqdm=True)
    assert "4 of 4 prompts" in capsys.readouterr().err
    with pytest.raises(InvalidRequestError, match="give one of them"):
        llm.generate(TEXTS, params, progress=True, use_tqdm=True)
    with pytest.raises(InvalidRequestError, match="progress= takes a callback"):
        llm.generate(TEXTS, params, use_tqdm=print)  # type: ignore[arg-type]


def test_chat_takes_vllms_arguments(llm: LLM) -> None:
    question = [{"role": "user", "content": "x"}]
    assert llm.chat_tokens(question, chat_template_kwargs={"a": 1}) == llm.chat_tokens(question, a=1)
    with pytest.raises(InvalidRequestError, match="lora_request=7 is not supported: LoRA"):
        llm.chat(question, lora_request=7)


def test_its_text_names_model_and_device(path: Path) -> None:
    with LLM(path, context_length=64) as model:
        assert repr(model) == "LLM('tiny.gguf', device='cpu', context_length=64)"
    assert repr(model) == "LLM('tiny.gguf', device='cpu', context_length=64, closed)"
    with pytest.raises(EngineDeadError):
        model.embed("x", pooling="mean")
