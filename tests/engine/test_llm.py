"""`LLM` end to end, on a real model: text in, text out, the same whatever runs beside it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realizar import LLM, SamplingParams
from realizar.errors import ContextLengthError, EngineDeadError, InvalidRequestError
from reference_tensors import looked_up
from resolving import core_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "Water boils at a temperature of " * 12,
    "One, two, three, four,",
]
GREETING = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, threads=1, context_length=512, max_running=8) as model:
        yield model


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[str]:
    """The greedy text of each prompt by itself."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]


def test_prompts_of_embeddings_are_as_their_ids(llm: LLM, alone: list[str]) -> None:
    """One, or some among others, in lists or in arrays of another type, and as a stream."""
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    rows = [looked_up(llm.spec, llm.checkpoint, each) for each in ids]
    (one,) = llm.generate({"prompt_embeds": rows[0]}, GREEDY)
    assert (one.outputs[0].text, one.prompt, len(one.prompt_token_ids)) == (alone[0], None, len(ids[0]))
    others = [{"prompt_embeds": rows[1].astype(np.float64)}, ids[2], PROMPTS[3], {"prompt_embeds": rows[4].tolist()}]
    assert [output.outputs[0].text for output in llm.generate(others, GREEDY)] == alone[1:]
    with llm.stream({"prompt_embeds": rows[3]}, GREEDY) as stream:
        assert "".join(delta.text for delta in stream) == alone[3]
    np.testing.assert_array_equal(
        llm.embed([{"prompt_embeds": rows[3]}], pooling="mean"), llm.embed(PROMPTS[3], pooling="mean")
    )
    with pytest.raises(InvalidRequestError, match="2 embeddings have 16 values; the model's have 576 each"):
        llm.generate({"prompt_embeds": [[0.0] * 8] * 2}, GREEDY)


def test_a_known_fact(alone: list[str]) -> None:
    assert alone[0].startswith(" Paris")


def test_prompts_together_are_as_alone(llm: LLM, alone: list[str]) -> None:
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == alone


@pytest.mark.parametrize(
    ("max_step_tokens", "block_size", "max_running"), [(7, 32, 3), (64, 96, 2)], ids=["small", "large"]
)
def test_chunks_blocks_and_rows_change_nothing(
    smollm2_path: Path, alone: list[str], max_step_tokens: int, block_size: int, max_running: int
) -> None:
    limits = {"max_step_tokens": max_step_tokens, "block_size": block_size, "max_running": max_running}
    with LLM(smollm2_path, threads=1, context_length=512, **limits) as other:
        assert [output.outputs[0].text for output in other.generate(PROMPTS, GREEDY)] == alone


def test_preemption_changes_nothing(smollm2_path: Path, llm: LLM) -> None:
    """A cache for two requests of full length, five that grow: sampled and greedy text stay what they were."""
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=90, ignore_eos=True, repetition_penalty=1.1)
    wanted = [output.outputs[0].text for output in llm.generate(PROMPTS[:4], sampling)]
    per_token = llm.capacity.kv_cache_bytes // (llm.capacity.num_blocks[0] * llm.capacity.block_size)
    with LLM(smollm2_path, threads=1, context_length=192, max_running=8, kv_cache_bytes=256 * per_token) as small:
        assert small.capacity.num_blocks[0] * small.capacity.block_size <= 256
        outputs = small.generate(PROMPTS[:4], sampling)
        assert core_of(small).scheduler.counts.num_preemptions > 0
    assert [output.outputs[0].text for output in outputs] == wanted


def test_a_stream_is_the_whole_in_deltas(llm: LLM, alone: list[str]) -> None:
    with llm.stream(PROMPTS[1], GREEDY) as stream:
        text = "".join(delta.text for delta in stream)
        output = stream.result()
    assert text == output.outputs[0].text == alone[1]
    assert output.prompt == PROMPTS[1]
    assert output.timings.queue_s >= 0
    assert output.decode_tokens_per_s > 0


def test_chat_uses_the_template_and_ends_by_itself(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=200)
    conversation = [{"role": "system", "content": "You answer briefly."}, *GREETING]
    default, second = llm.chat([GREETING, conversation], sampling)
    for output, system in ((default, "You are a helpful AI assistant"), (second, "You answer briefly.")):
        rendered = llm.tokenizer.decode(output.prompt_token_ids, skip_special=False)
        assert rendered.startswith(f"<|im_start|>system\n{system}")
        assert rendered.endswith("<|im_start|>assistant\n")
    assert second.outputs[0].text.startswith("Hello")
    assert (second.outputs[0].finish_reason, second.outputs[0].stop_reason) == ("stop", llm.tokenizer.eos_id)
    with llm.chat_stream(conversation, sampling) as stream:
        assert "".join(delta.text for delta in stream) == second.outputs[0].text


def test_a_stop_string_cut_across_tokens(llm: LLM, alone: list[str]) -> None:
    stop = alone[1][9:14]
    output = llm.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=24, stop=(stop,)))[0].outputs[0]
    assert output.text == alone[1][: alone[1].index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 24


def test_token_ids_are_a_prompt_too(llm: LLM, alone: list[str]) -> None:
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert llm.generate(ids[0], GREEDY)[0].outputs[0].text == alone[0]
    both = llm.generate([ids[0], PROMPTS[1]], GREEDY)
    assert [output.outputs[0].text for output in both] == alone[:2]
    assert [output.prompt for output in both] == [None, PROMPTS[1]]
    assert llm.generate([], GREEDY) == []


def test_seeds_and_choices(llm: LLM) -> None:
    """The same seed gives the same texts, alone or beside others; choices of one request differ."""
    sampling = SamplingParams(seed=42, n=3, max_tokens=16)
    first = [choice.text for choice in llm.generate(PROMPTS[1], sampling)[0].outputs]
    beside = llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], sampling)[1]
    assert [choice.text for choice in beside.outputs] == first
    assert len(set(first)) == 3


def test_scores_are_those_of_generation(llm: LLM) -> None:
    """Teacher-forced log-probabilities of a greedy text are those with which it was generated."""
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, logprobs=3))[0]
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    scores = llm.score(tokens, 3)
    assert len(scores) == len(tokens)
    assert scores[0] is None
    assert output.outputs[0].logprobs is not None
    assert tuple(scores[len(output.prompt_token_ids) :]) == output.outputs[0].logprobs
    for token_id, score in zip(tokens[1:], scores[1:], strict=True):
        assert score is not None
        assert (score.token_id, len(score.top)) == (token_id, 3)
        assert score.rank != 1 or score.top[0] == (token_id, score.logprob)


def test_the_context_is_never_cut(llm: LLM) -> None:
    full = [1] * 511
    assert len(llm.generate(full, SamplingParams(temperature=0.0, ignore_eos=True))[0].outputs[0].token_ids) == 1
    with pytest.raises(ContextLengthError, match="has 512 and 1 are to be generated: together 513"):
        llm.generate([1] * 512)
    with pytest.raises(ContextLengthError, match="has 5 and 508 are to be generated"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=508))
    assert len(llm.score([1] * 512)) == 512
    with pytest.raises(ContextLengthError):
        llm.score([1] * 513)


def test_one_bad_prompt_runs_none(llm: LLM, alone: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.generate([PROMPTS[0], ""], GREEDY)
    with pytest.raises(InvalidRequestError, match="not float"):
        llm.generate([[1, 2], [0.5]], GREEDY)  # type: ignore[list-item]
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == alone[0]


def test_a_closed_model_says_so(smollm2_path: Path) -> None:
    model = LLM(smollm2_path, context_length=64, max_running=1)
    model.close()
    model.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        model.generate("x", GREEDY)


def test_a_model_that_nobody_has_any_more_ends(smollm2_path: Path) -> None:
    """So that another one in its name gets its memory."""
    model = LLM(smollm2_path, context_length=64, max_running=1)
    thread, core = model._thread._thread, core_of(model)
    del model
    assert not thread.is_alive()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        core.step()


def test_an_error_of_a_callback_is_the_callers(llm: LLM) -> None:
    def fail(done: int, total: int) -> None:
        raise LookupError(f"{done} of {total}")

    with pytest.raises(LookupError, match="of 3"):
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0.0, ignore_eos=True), progress=fail)
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM, alone: list[str]) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=3)
    first, second = llm.generate(PROMPTS[:2], [GREEDY, short])
    assert first.outputs[0].text == alone[0]
    assert len(second.outputs[0].token_ids) == 3
    assert alone[1].startswith(second.outputs[0].text)
    talks = llm.chat([GREETING, GREETING], [short, SamplingParams(temperature=0.0, max_tokens=5)])
    assert [len(talk.outputs[0].token_ids) for talk in talks] == [3, 5]
    assert llm.generate([], []) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([GREEDY], "1 sampling parameters were given for 2 prompts: give one for all, or one for each"),
        ([], "0 sampling parameters were given for 2 prompts"),
        ([GREEDY, {"temperature": 0}], "sampling_params must be SamplingParams, not dict"),
        ({"temperature": 0}, "sampling_params must be SamplingParams, not dict"),
        ("greedy", "sampling_params must be SamplingParams, not str"),
    ],
)
def test_parameters_that_do_not_match_are_refused(llm: LLM, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(PROMPTS[:2], given)


def test_progress_of_many_prompts(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realizar.engine.frontend.prompt_progress._INTERVAL_S", 0.0)
    reported: list[tuple[int, int]] = []
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 4, 7)]
    llm.generate(PROMPTS[:3], params, progress=lambda done, total: reported.append((done, total)))
    assert reported == sorted(reported)
    assert {(1, 3), (2, 3)} <= set(reported)
    assert reported.count((3, 3)) == 1
    assert reported[-1] == (3, 3)
    llm.generate(PROMPTS[:3], params)
    assert capsys.readouterr().err == "", "stderr is no terminal"
    llm.generate(PROMPTS[:3], params, progress=True)
    shown = capsys.readouterr().err
    assert "1 of 3 prompts" in shown
    assert shown.endswith("\n")
    assert "3 of 3 prompts" in shown.splitlines()[-1]


def test_a_terminal_shows_progress_of_several_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    short = SamplingParams(temperature=0.0, max_tokens=2)
    for wanted, prompts, is_shown in ((None, 2, True), (None, 1, False), (False, 2, False)):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        llm.generate(PROMPTS[:prompts], short, progress=wanted)
        assert bool(terminal.getvalue()) == is_shown


def test_blocks_that_left_a_window_are_not_missed(gemma3_path: Path) -> None:
    """Prompts and answers beyond gemma's window of 512: in large chunks alone, in small ones beside another."""
    numbers = " ".join(str(number) for number in range(1, 190))
    texts = []
    for max_step_tokens, prompts in ((512, [numbers]), (120, [numbers, PROMPTS[1]])):
        with LLM(gemma3_path, threads=1, context_length=1024, max_running=2, max_step_tokens=max_step_tokens) as model:
            output = model.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40))[0]
            assert len(output.prompt_token_ids) > 560
            texts.append(output.outputs[0].text)
            core_of(model).audit()
    assert texts[0] == texts[1]
    assert texts[0].startswith(" 190 191 192")


@pytest.mark.parametrize("prompts", [5, None, 1.5, {"prompt": "a"}, {"prompt_token_ids": [1, 2]}, b"abc", [b"abc"]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a prompt must be text, token ids or "):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("prompt", [["a", "b"], {"prompt": "a"}, 5])
def test_a_stream_takes_one_prompt(llm: LLM, prompt: Any) -> None:
    several = isinstance(prompt, list)
    said = "one prompt is wanted here, not a list of texts" if several else "a prompt must be text, token ids or "
    with pytest.raises(InvalidRequestError, match=said):
        llm.stream(prompt, GREEDY)
