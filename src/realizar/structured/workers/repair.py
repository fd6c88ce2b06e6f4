"""`Repair` follows rows anew whose process has died, each alone, to find the one that ends it again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from realizar.errors import InvalidRequestError, RealizarError
from realizar.outputs import ErrorCause
from realizar.structured.workers.followed import FollowedGrammar, FollowedRow
from realizar.structured.workers.server_handle import ServerError
from realizar.structured.workers.worker import GrammarWorker, WorkerDiedError

_LOG = logging.getLogger(__name__)
_MOST_LATE = 2  # rows of a grammar that may time out one by one, before the other rows are given up


class Repair:
    """Runs on threads of its own, with processes that nobody else uses meanwhile.

    Args:
        follow: has a process follow a row, and waits for its masks. Raises WorkerDiedError.
        revive: gives a grammar a new process. Raises RealizarError, ServerError or WorkerDiedError.
        condemn: callback with a grammar, a reason and the cause, when its process died of one row alone.
    """

    def __init__(
        self,
        follow: Callable[[FollowedRow, GrammarWorker], None],
        revive: Callable[[FollowedGrammar], GrammarWorker],
        condemn: Callable[[FollowedGrammar, str, ErrorCause], None],
    ) -> None:
        self._follow, self._revive, self._condemn = follow, revive, condemn

    def follow_anew(
        self, grammar: FollowedGrammar, rows: Sequence[FollowedRow], first: ErrorCause
    ) -> GrammarWorker | None:
        """Follow each row anew, alone, in a new process. Only a row that ends its process again gets an error.

        If the `first` death was not the grammar's fault, one more death is not a proof against the grammar.

        Returns:
            The process, if it is alive.
        """
        worker: GrammarWorker | None = None
        num_late = 0
        reason, cause = "", first
        for row in rows:
            if row.closed:
                continue
            if num_late >= _MOST_LATE:
                row.fail(reason, cause)
                continue
            try:
                if worker is None:
                    worker = self._revive(grammar)
            except (RealizarError, ServerError, WorkerDiedError) as error:
                num_late, reason = _MOST_LATE, f"it can't be compiled again: {error}"
                cause = "request" if isinstance(error, InvalidRequestError) else "engine"
                row.fail(reason, cause)
                continue
            try:
                self._follow(row, worker)
            except WorkerDiedError as death:
                worker = None
                num_late += death.out_of_time
                cause = death.cause if first == "request" else "engine"
                reason = f"following it {death}"
                row.fail(reason, cause)
                self._condemn(grammar, reason, cause)
        return worker

    def new_worker(self, grammar: FollowedGrammar) -> GrammarWorker | None:
        """One more process for a grammar, if that is possible now; it need not be."""
        try:
            return self._revive(grammar)
        except (RealizarError, ServerError, WorkerDiedError) as error:
            _LOG.info("a grammar gets no further process: %s", error)
            return None
