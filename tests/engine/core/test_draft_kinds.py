"""Random requests with drafts of every kind on the CPU: the same tokens, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.core.draft_kinds import COUNT, KINDS, DraftKinds, predicted, random_requests
from realizar.backends.cpu.runner import CPUBackend


@pytest.fixture(scope="module")
def kinds() -> Iterator[DraftKinds]:
    made = DraftKinds(CPUBackend)
    yield made
    made.close()


def test_predictions_change_no_token(kinds: DraftKinds) -> None:
    kinds.check("lookup", predicted(random_requests(COUNT), kinds.plain("lookup")[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(kind: str, kinds: DraftKinds) -> None:
    kinds.check(kind, random_requests(COUNT))


def test_depths_that_are_measured_change_no_token(kinds: DraftKinds) -> None:
    kinds.check("block", random_requests(COUNT), measures=True)
