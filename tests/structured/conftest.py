"""Fixtures of several tests of structured output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from realizar.structured.workers.service import GrammarService
from structured.grammar_followers import make_service


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = make_service()
    yield made
    made.close()
