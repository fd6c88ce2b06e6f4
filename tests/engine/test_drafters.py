"""Drafters by their names: who drafts, what a model that drafts takes, and which ones are refused."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realizar import LLM
from realizar.backends.select import plan_memory, resolve_model
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.cli.main import app, run_app
from realizar.config import EngineConfig
from realizar.engine.draft_models import open_drafter
from realizar.engine.loading import load_core
from realizar.engine.planned_load import plan_within
from realizar.engine.stats import EngineStats
from realizar.errors import InvalidRequestError, UnsupportedModelError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.server.metrics import exposition_of
from tiny_model import write_tiny_model

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "context_length": 256, "kv_cache_bytes": 4 << 20}
PROMPTS = ["one two three four", "Once upon a time"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafters") / "tiny.gguf"
    write_tiny_model(path)
    return path


def changed(path: Path, new: Path, **metadata: Any) -> Path:
    """The model with other metadata, whose keys have two underscores for a dot."""
    checkpoint = open_checkpoint(path)
    own = {name.replace("__", "."): value for name, value in metadata.items()}
    tensors = [NewTensor(name, each.ggml_type, each.shape, each.data) for name, each in checkpoint.tensors.items()]
    write_gguf(new, {**checkpoint.metadata, **own}, tensors)
    return new


def texts(path: Path, **options: Any) -> tuple[list[str], int]:
    """The answers, and the number of tokens that a backend may draft."""
    with LLM(path, **OPTIONS, **options) as llm:
        found = llm.generate(
            PROMPTS, [SamplingParams(temperature=0, max_tokens=30), SamplingParams(seed=5, max_tokens=30)]
        )
        return [each.outputs[0].text for each in found], llm.capacity.num_drafts


def test_requests_say_how_many_drafts_were_right(path: Path) -> None:
    with LLM(path, **OPTIONS, drafter=str(path), prompt_lookup_min=90, prompt_lookup_max=90) as llm:
        (found,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=31, ignore_eos=True))
    assert found.drafts.drafted == found.drafts.accepted >= 20


def test_stop_strings_end_texts_where_they_do_without_drafts(path: Path) -> None:
    """Each is a part of the text of its own request, seldom whole tokens, and may be found within accepted drafts."""
    rng = random.Random(4)
    samplings = [SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=40) for index in range(12)]
    prompts = [f"{PROMPTS[index % 2]} {index}" for index in range(12)]

    def answers(**options: Any) -> list[tuple[str, str | None]]:
        with LLM(path, **OPTIONS, **options) as llm:
            made = [each.outputs[0] for each in llm.generate(prompts, samplings)]
        return [(each.text, each.finish_reason) for each in made]

    for index, (text, _) in enumerate(answers()):
        first = rng.randrange(len(text) // 2, len(text) - 3)
        samplings[index] = replace(samplings[index], stop=(text[first : first + 3],))
    expected = answers()
    assert [reason for _, reason in expected].count("stop") > 6
    assert answers(drafter=str(path)) == answers(drafter=str(path), speculative_tokens=1) == expected
    assert answers(drafter="lookup", speculative_tokens=4, prompt_lookup_min=1) == expected


def test_metrics_count_drafts_by_place(path: Path) -> None:
    config = EngineConfig(**OPTIONS, drafter=str(path), prompt_lookup_min=90, prompt_lookup_max=90)
    core = load_core(open_checkpoint(path), config)
    core.add(Request("a", tuple(range(40, 60)), SamplingParams(temperature=0), 33))
    while core.has_work:
        core.step()
    counts = core.scheduler.counts
    core.close()
    assert counts.accepted_by_place == (counts.num_drafts,) * 3
    assert sum(counts.accepted_by_place) == counts.accepted_tokens == counts.draft_tokens == 3 * counts.num_drafts
    text = exposition_of({"tiny": EngineStats(accepted_by_place=(5, 2), num_drafts=6)}, ()).decode()
    assert 'realizar:spec_decode_num_drafts_total{model_name="tiny"} 6.0' in text
    assert 'realizar:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="1"} 2.0' in text


def test_a_model_drafts_three_tokens_unless_another_number_is_wanted(path: Path) -> None:
    plain, none = texts(path)
    assert none == 0
    assert texts(path, drafter=str(path)) == (plain, 3)
    assert texts(path, drafter=str(path), speculative_tokens=5) == (plain, 5)
    assert texts(path, drafter=str(path), speculative_tokens=0) == (plain, 0)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 0), ({"speculative_tokens": 4}, 4), ({"drafter": "off", "speculative_tokens": 4}, 0),
        ({"drafter": "lookup"}, 0), ({"drafter": "small.gguf"}, 3),
        ({"drafter": "small.gguf", "speculative_tokens": 1}, 1),
    ],
)  # fmt: skip
def test_who_drafts_says_how_much(path: Path, fields: dict[str, Any], tokens: int) -> None:
    resolved = resolve_model(open_checkpoint(path), EngineConfig(**OPTIONS, **fields))[1]
    assert resolved.speculative_tokens == tokens
    assert (resolved.draft_model is not None) is ("small.gguf" in fields.values())


def test_no_name_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="drafter must be off, lookup, auto, or a model"):
        EngineConfig(drafter="")


def test_other_vocabularies_are_refused_and_a_few_names_pass(path: Path, tmp_path: Path) -> None:
    tokens = list(open_checkpoint(path).metadata["tokenizer.ggml.tokens"])
    mixed = changed(path, tmp_path / "mixed.gguf", tokenizer__ggml__tokens=[*tokens[255::-1], *tokens[256:]])
    message = "the drafter mixed.gguf has another vocabulary: 256 of its ids stand for other texts, such as 0"
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        load_core(open_checkpoint(path), EngineConfig(**OPTIONS, drafter=str(mixed)))
    renamed = changed(path, tmp_path / "renamed.gguf", tokenizer__ggml__tokens=[*tokens[:-1], "<|spare|>"])
    assert texts(path, drafter=str(renamed)) == texts(path, drafter=str(path))


def test_a_shorter_context_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "short.gguf", context=128)
    with pytest.raises(UnsupportedModelError, match=r"the drafter .*short.gguf: context_length 256 is not within 1 to"):
        load_core(open_checkpoint(path), EngineConfig(**OPTIONS, drafter=str(tmp_path / "short.gguf")))


def test_plans_have_the_memory_of_both(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, config = open_checkpoint(path), EngineConfig(**OPTIONS, drafter=str(path))
    spec, resolved = resolve_model(checkpoint, config)
    alone, both = (
        plan_memory(spec, checkpoint, resolved, 1 << 30, each) for each in ({}, open_drafter(checkpoint, resolved))
    )
    assert both.beside_bytes >= alone.weight_bytes > 0
    assert both.contexts[-1].request_bytes == 2 * alone.contexts[-1].request_bytes
    assert (
        plan_within(checkpoint, config, 1 << 30)[0].num_bytes
        > plan_within(checkpoint, EngineConfig(**OPTIONS), 1 << 30)[0].num_bytes
    )
    words = ["plan", str(path), "--device", "cpu", "-c", "256", "--memory", "1G", "--drafter", str(path)]
    assert run_app(app, words) == 0
    assert re.search(r"^drafter +\d.* of weights and workspace, tiny.gguf$", capsys.readouterr().out, re.MULTILINE)


def test_several_models_have_no_common_drafter(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["serve", str(path), str(path), "--drafter", str(path)]) == 1
    assert "--drafter names a model that drafts for a single one" in capsys.readouterr().err


def beside(path: Path, folder: Path, **drafters: Path) -> Path:
    """A copy of a model in a folder of its own, with drafters by names that have two underscores for -."""
    folder.mkdir()
    for name, file in drafters.items():
        shutil.copy(file, folder / f"{name.replace('__', '-')}.gguf")
    return Path(shutil.copy(path, folder / "tiny.gguf"))


def test_auto_takes_the_first_drafter_beside_a_model_that_suits_it(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = list(open_checkpoint(path).metadata["tokenizer.ggml.tokens"])
    mixed = changed(path, tmp_path / "mixed.gguf", tokenizer__ggml__tokens=[*tokens[255::-1], *tokens[256:]])
    model = beside(path, tmp_path / "both", tiny__assistant=path, mtp__tiny=mixed)
    assert texts(model, drafter="auto") == (texts(path)[0], 3)
    assert texts(model) == texts(model, drafter="auto", speculative_tokens=0) == (texts(path)[0], 0)
    config, assistant = EngineConfig(**OPTIONS, drafter="auto"), str(model.with_name("tiny-assistant.gguf"))
    loads = [plan_within(open_checkpoint(model), each, 1 << 30)[0] for each in (config, EngineConfig(**OPTIONS))]
    assert (loads[0].config.drafter, loads[0].num_bytes > loads[1].num_bytes) == (assistant, True)
    for words in (["run", str(model), "One", "--max-tokens", "2"], ["run", str(path), "One", "--max-tokens", "2"]):
        assert run_app(app, [*words, "--drafter", "auto", "--threads", "1", "-c", "256"]) == 0
    said = capsys.readouterr().err
    assert "drafts: up to 3 by tiny-assistant.gguf, which lies beside the model\n" in said
    assert "drafts: by the text alone, as no drafter lies in the model's file or beside it\n" in said
    assert not caplog.messages
    for words, found in (
        (["plan", str(model), "--drafter", "auto", "--device", "cpu", "-c", "256"], "tiny-assistant.gguf"),
        (["inspect", str(model)], assistant),
    ):
        assert run_app(app, [*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["drafter"] == found
    blind = beside(path, tmp_path / "blind", mtp__tiny=mixed)
    assert texts(blind, drafter="auto") == texts(path)
    (line,) = caplog.messages
    assert line.startswith("mtp-tiny.gguf does not draft: the drafter mtp-tiny.gguf has another vocabulary")
    assert run_app(app, ["plan", str(blind), "--drafter", "auto", "--device", "cpu", "-c", "256"]) == 0
    assert f"\ndrafter      none: {line}\n" in capsys.readouterr().out
