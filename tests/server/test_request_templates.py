"""Templates of requests run in processes that are ended when a single operation takes all of their time."""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from realizar.checkpoint.model_files import ModelFiles
from realizar.cli.several_models import Wishes, _Found, _known
from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint
from realizar.engine.planned_load import PlannedLoad
from realizar.engine.process.planning import PlanAnswer
from realizar.errors import ChatTemplateError
from realizar.ipc import apart
from realizar.sampling_params import SamplingParams
from realizar.server import request_templates
from realizar.server.models.lives import EngineLoader
from realizar.server.request_templates import RequestCompiler
from realizar.server.settings import ServerSettings
from realizar.tokenizer.parsers.choose import find_format, format_of
from realizar.tokenizer.templates.chat_messages import TemplateBoundsError
from realizar.tokenizer.templates.chat_template import ChatTemplate, CompiledTemplate
from tiny_model import write_tiny_model
from tokenizer.templates.test_chat_template import tokenizer, user

ONE_HASH = (1 << 61) - 1
# Each takes minutes or more in one operation, within a budget that is looked at between operations.
ENDLESS = {
    "numbers of one hash": f"{{{{ range({ONE_HASH}, {ONE_HASH * 90_000}, {ONE_HASH}) | unique | list, tools }}}}",
    "a text from its end": "{{ ('a' * 800000).rfind('a' * 200000 + 'b' + 'a' * 200000), tools }}",
}


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit statuses of the processes that are ended from now on."""
    found: list[int] = []
    close = apart._Process.close

    def noting(process: Any) -> int:
        found.append(close(process))
        return found[-1]

    monkeypatch.setattr(apart._Process, "close", noting)
    return found


@pytest.mark.parametrize("source", ENDLESS.values(), ids=list(ENDLESS))
def test_an_endless_operation_is_ended(source: str, statuses: list[int]) -> None:
    template = ChatTemplate(tokenizer("own"), source, RequestCompiler())
    for _ in range(2):  # the second time its request has no time left, and no process is asked
        with pytest.raises(TemplateBoundsError, match=r"^the chat template takes too long$"):
            format_of(template.compiled())
        with pytest.raises(TemplateBoundsError, match=r"^the chat template takes too long$"):
            template.encode(user("x"))
    assert statuses == [-signal.SIGPROF]
    assert ChatTemplate(tokenizer("own"), "{{ messages[0].content }}", RequestCompiler()).render(user("x")) == "x"


def test_renderings_of_one_request_share_their_time() -> None:
    loops = "{% for a in range(100000) %}{% endfor %}"  # in the budget of one rendering
    compiler = RequestCompiler()
    render, _ = compiler(loops)

    def render_often() -> None:
        for _ in range(10_000):
            render({})

    with pytest.raises(TemplateBoundsError, match="takes too long"):
        render_often()
    with pytest.raises(TemplateBoundsError, match="takes too long"):
        compiler("x")


@pytest.mark.skipif(sys.platform != "linux", reason="no other system has this limit")
def test_memory_is_bounded() -> None:
    RequestCompiler()("x")
    for process in request_templates._PROCESSES._idle.queue:
        assert resource.prlimit(process._process.pid, resource.RLIMIT_DATA)[0] < 2 << 30


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}",
        "{% if messages[0].content is string %}{{ raise_exception('\ud800 no text') }}{% endif %}",
        "{{ nothing.at.all }}",
        "{% if %}",
        "",
    ],
)
def test_results_and_errors_are_those_of_this_process(source: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"minimum": 1 << 70}}}}}]

    def outcome(template: ChatTemplate) -> list[Any]:
        try:
            return [
                template.render(user("é\ud800"), tools, other=[1.5, None, True, 1 << 80]),
                template.compiled().takes_tools,
                format_of(template.compiled(tools)),
            ]
        except ChatTemplateError as error:
            return [type(error), str(error).encode("utf-8", "replace")]

    own = ChatTemplate(tokenizer("own"), source)
    assert outcome(ChatTemplate(tokenizer("own"), source, RequestCompiler())) == outcome(own)


def test_a_process_that_died_idle_is_replaced() -> None:
    assert RequestCompiler()("a")[0]({}) == "a"
    for process in request_templates._PROCESSES._idle.queue:
        process._process.kill()
        process._process.wait()
    assert RequestCompiler()("a")[0]({}) == "a"


def test_one_that_ends_before_it_is_asked_costs_its_request_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RequestCompiler()("a")[0]({}) == "a"
    for process in request_templates._PROCESSES._idle.queue:
        process._process.kill()
        process._process.wait()
    monkeypatch.setattr(apart._Process, "alive", True)  # it was alive a moment ago
    assert RequestCompiler()("a")[0]({}) == "a"


@pytest.mark.parametrize("by_client", [True, False])
def test_the_template_of_a_model_that_a_client_pulled_runs_there_too(
    by_client: bool, tmp_path: Path, statuses: list[int]
) -> None:
    """Its abilities are found there as well, before any request; the other's are found in this process."""
    path = tmp_path / "pulled.gguf"
    source = ENDLESS["a text from its end"] if by_client else "{{ messages[0].content }}"
    write_tiny_model(path, source)
    checkpoint = find_checkpoint(path)
    wishes = Wishes(EngineConfig(), lambda _: SamplingParams(), None, "info")
    load = PlannedLoad(EngineConfig(), 1, "cpu", 512, 1, 0, 0)
    answer = PlanAnswer(load)
    model = _known(_Found("pulled", checkpoint, named=False, by_client=by_client), answer, wishes)
    served = EngineLoader({"pulled": ModelFiles(checkpoint)}, ServerSettings(), "info", None)._served(model)
    assert served.template is not None
    for _ in range(2):  # a model's renderings have an allowance each
        if by_client:
            with pytest.raises(TemplateBoundsError, match=r"^the chat template takes too long$"):
                served.template.render(user("x"))
        else:
            assert served.template.render(user("x")) == "x"
    assert len(statuses) == (4 if by_client else 0)


def test_a_template_that_exceeds_its_bounds_has_no_format() -> None:
    source = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}{{ tools }}"
    with pytest.raises(TemplateBoundsError):
        find_format(source)
    with pytest.raises(TemplateBoundsError):
        format_of(CompiledTemplate(source, {}))
