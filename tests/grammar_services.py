"""Services that compile and follow grammars, for tests that make many engines."""

from __future__ import annotations

from realizar.structured.workers.service import GrammarService


class LastingService(GrammarService):
    """One that engines don't close with themselves; `end` does."""

    def close(self) -> None:
        """Nothing: other engines use it too."""

    def end(self) -> None:
        """End it."""
        super().close()
