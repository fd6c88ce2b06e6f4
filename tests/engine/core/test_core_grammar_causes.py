"""A request whose grammar can't be followed any more gets an error that names the cause; others go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from grammar_services import LastingService
from realizar.config import EngineConfig
from realizar.engine.frontend.open_requests import error_of
from realizar.errors import InvalidRequestError, RequestFailedError
from realizar.outputs import ErrorCause
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens
from resolving import new_core
from scripted_backend import VOCAB_SIZE, ScriptedBackend, expected_tokens, make_spec
from step_inputs import TokenOutput, stepped

END = 94
TOKENS = [bytes((0x20 + index,)) for index in range(END)] + [b"<end>", b"<control>"]
LETTERS = StructuredOutput("regex", "[a-f]{9}x")


class Service(LastingService):
    """Fails the second step that has grammars: raises, or puts its rows in error."""

    def __init__(self, failure: Exception | ErrorCause) -> None:
        super().__init__(GrammarTokens(TOKENS, (95,), (END,), VOCAB_SIZE))
        self.failure, self.num_steps = failure, 0
        self._ask = self.rows.ask
        self.rows.ask = self.ask  # type: ignore[method-assign]

    def ask(self, slots: NDArray[np.intp], drafts: Mapping[int, tuple[int, ...]]) -> None:
        self.num_steps += 1
        if self.num_steps == 2:
            if isinstance(self.failure, Exception):
                raise self.failure
            for slot in slots.tolist():
                row = self.rows._rows[slot]
                assert row is not None
                self.rows.fail(row, "it is over", self.failure)
        self._ask(slots, drafts)


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    made = Service(request.param)
    yield made
    made.end()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("service", "raised", "reason"),
    [
        (KeyError("a secret path"), RequestFailedError, "masks could not be computed: KeyError"),
        ("engine", RequestFailedError, "it is over"),
        ("request", InvalidRequestError, "it is over"),
    ],
    indirect=["service"],
)
def test_a_request_gets_the_cause_of_the_fault(
    service: Service, raised: type[Exception], reason: str, in_flight: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of the machine is not an error of the request, and the log names it."""
    backend = ScriptedBackend()
    core = new_core(
        backend,
        make_spec(backend.windows),
        EngineConfig(max_running=10, max_step_tokens=100),
        new_grammars=lambda: service,
        steps_in_flight=in_flight,
    )
    plain = Request("plain", (4, 5), SamplingParams(temperature=0), 12)
    core.add(plain)
    sampling = SamplingParams(temperature=0, structured=LETTERS, stop_token_ids=(END,))
    core.add(Request("stuck", (1, 2), sampling, 12))
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    while core.has_work:
        for output in stepped(core):
            outputs[output.request_id].append(output)
        core.audit()
    failure = outputs["stuck"][-1].error
    assert failure is not None
    error = error_of(failure)
    assert type(error) is raised
    assert str(error) == f"the output can't go on within its grammar: {reason}"
    assert getattr(error, "param", None) == ("structured" if raised is InvalidRequestError else None)
    assert ("request stuck ended" in caplog.text) == (raised is RequestFailedError)
    sampled = [token_id for output in outputs["plain"] for token_id in output.token_ids]
    assert sampled == expected_tokens((4, 5), (None,), plain.sampling, 12)
    core.close()
