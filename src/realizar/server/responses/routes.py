"""The Responses API: its routes and the form of its streams. Its errors have the form of OpenAI's other APIs."""

from __future__ import annotations

from realizar.server.errors import PLAIN_SCHEMA, plain_body
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.responses.create import count_input_tokens, create_response
from realizar.server.responses.kept import cancel_response, delete_response, list_input_items, show_response
from realizar.server.responses.records import InputTokensRequest, ResponsesRequest

_KEPT = "/v1/responses/{response_id}"

RESPONSES = Dialect(
    name="Responses",
    routes=(
        ApiRoute("/v1/responses", create_response, "Answer a conversation (Responses).", ResponsesRequest),
        ApiRoute("/v1/responses/input_tokens", count_input_tokens, "Count the tokens of a prompt.", InputTokensRequest),
        ApiRoute(_KEPT, show_response, "A kept response."),
        ApiRoute(_KEPT, delete_response, "Forget a kept response.", verb="DELETE"),
        ApiRoute(f"{_KEPT}/input_items", list_input_items, "The items that led to a kept response."),
        ApiRoute(f"{_KEPT}/cancel", cancel_response, "Refused: no response is made in the background.", verb="POST"),
    ),
    error_body=plain_body,
    error_schema=PLAIN_SCHEMA,
    stream=StreamForm(ping=b": ping\n\n", end=b"", error=lambda error: b""),  # the stream's own event names the error
)
