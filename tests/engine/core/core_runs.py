"""An engine core that is driven to the end of its work."""

from __future__ import annotations

from collections import defaultdict

from realizar.engine.core.engine_core import EngineCore
from step_inputs import TokenOutput, stepped


def run(core: EngineCore) -> dict[str, list[TokenOutput]]:
    """All outputs by request; the core is audited after every step."""
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    while core.has_work:
        for output in stepped(core):
            outputs[output.request_id].append(output)
        core.audit()
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]
