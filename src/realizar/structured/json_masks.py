"""`JsonMasks`: masks of one JSON schema by the place in its texts, so that each is computed once. Standard library."""

from __future__ import annotations

from realizar.structured.json_steps import JsonState, JsonSteps
from realizar.structured.state_masks import StateMasks


class JsonMasks(StateMasks[JsonState]):
    """Masks by place, for all rows of the schema.

    Attributes:
        steps: leads from place to place.
    """

    def __init__(self, steps: JsonSteps) -> None:
        super().__init__(steps.start)
        self.steps = steps

    def after(self, state: JsonState | None, token_id: int) -> JsonState | None:
        return None if state is None else self.steps.after(state, token_id)

    def can_keep(self, state: JsonState) -> bool:
        return state.place.is_known
