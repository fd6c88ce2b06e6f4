"""Programs that people already have: lm-eval over local data, and LangChain."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from server_thread import RunningServer

MODEL = "org/smollm2"
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " a banana"], "answer": 0},
    {"question": "Two plus two is", "choices": [" a horse", " four"], "answer": 1},
    {"question": "The sun rises in the", "choices": [" east", " purple soup"], "answer": 0},
    {"question": "Water is", "choices": [" angry at shoes", " wet"], "answer": 1},
]
TASK = """
task: local_facts
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "texts"])
def test_lm_eval_scores_a_task(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenized: bool
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is absent")
    from lm_eval.tasks import TaskManager

    data = tmp_path / "facts.json"
    data.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    (tmp_path / "facts.yaml").write_text(TASK.format(data=data))
    arguments = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=1"
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"{arguments},tokenized_requests={tokenized},max_retries=1",
        tasks=["local_facts"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=3,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert results["results"]["local_facts"]["acc,none"] == 1.0
    for sample in results["samples"]["local_facts"]:
        for choice, (logprob, greedy) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            wanted = _logprob(server, sample["doc"]["question"], choice)
            assert float(logprob) == pytest.approx(wanted, abs=1e-4)
            assert str(greedy) in ("True", "False")
    first = results["samples"]["local_facts"][0]["filtered_resps"]
    assert str(first[0][1]) == "True"  # Paris is what greedy choice gives


def _logprob(server: RunningServer, question: str, choice: str) -> float:
    """The choice's log-probability by the engine's own scoring."""
    from realizar.sampling_params import SamplingParams

    tokenizer = server.model.tokenizer
    ids = tokenizer.encode(question + choice, add_special=False)
    start = len(tokenizer.encode(question, add_special=False))

    async def score() -> Any:
        stream = await server.engine.generate(ids, SamplingParams(prompt_logprobs=0), score_only=True)
        return await stream.result()

    listed = server.wait(score()).prompt_logprobs
    return math.fsum(entry.logprob for entry in listed[start:])


def test_langchain_streams_and_knows_the_overflow(server: RunningServer) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain_openai is absent")
    from langchain_core.exceptions import ContextOverflowError

    model = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=16, max_retries=0
    )
    deltas = list(model.stream("Say hello."))
    whole = model.invoke("Say hello.")
    assert len(deltas) > 4
    assert "".join(delta.content for delta in deltas) == whole.content
    assert whole.usage_metadata["output_tokens"] == whole.response_metadata["token_usage"]["completion_tokens"]
    with pytest.raises(ContextOverflowError):
        model.invoke("long " * 3000)
    with pytest.raises(ContextOverflowError):
        list(model.stream("long " * 3000))


def test_langchain_binds_tools_and_schemas(server: RunningServer) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain_openai is absent")
    model = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=120, max_retries=0
    )
    schema = {
        "title": "Weather",
        "description": "Tell the weather of a city.",
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    bound = model.bind_tools([schema], tool_choice="Weather")
    calls = bound.invoke("How is the weather in Rome?").tool_calls
    assert [call["name"] for call in calls] == ["Weather"]
    assert set(calls[0]["args"]) == {"city"}
    answer = model.with_structured_output(schema, method="json_schema", strict=True).invoke("Weather in Rome?")
    assert set(answer) == {"city"}
