"""OpenAI's dialect: its routes, with vLLM's for rerankers and the tokenizer, and the form of its errors."""

from __future__ import annotations

from realizar.server.errors import PLAIN_SCHEMA, plain_body
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.sse import encode_event
from realizar.server.openai.chat import chat_completions
from realizar.server.openai.completions import completions
from realizar.server.openai.embeddings import embeddings
from realizar.server.openai.models import list_models, show_model
from realizar.server.openai.ranking import rerank, score
from realizar.server.openai.records.chat import ChatCompletionRequest
from realizar.server.openai.records.completion import CompletionRequest
from realizar.server.openai.records.embedding import EmbeddingRequest
from realizar.server.openai.records.ranking import RerankRequest, ScoreRequest
from realizar.server.openai.records.tokenize import DetokenizeRequest, TokenizeRequest
from realizar.server.openai.tokenizer_routes import detokenize, tokenize, tokenizer_info

_RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")  # paths of Jina's clients, of Cohere's and of vLLM's
_SCORE = ("/v1/score", "/score")

OPENAI = Dialect(
    name="OpenAI",
    routes=(
        ApiRoute("/v1/chat/completions", chat_completions, "Answer a conversation.", ChatCompletionRequest),
        ApiRoute("/v1/completions", completions, "Complete prompts.", CompletionRequest),
        ApiRoute("/v1/embeddings", embeddings, "Embed texts.", EmbeddingRequest),
        *(ApiRoute(path, rerank, "Order documents by a query.", RerankRequest) for path in _RERANK),
        *(ApiRoute(path, score, "Scores of pairs of texts.", ScoreRequest) for path in _SCORE),
        ApiRoute("/v1/models", list_models, "Names of the model."),
        ApiRoute("/v1/models/{name:path}", show_model, "One of them."),
        ApiRoute("/tokenize", tokenize, "Token ids of a text or of messages.", TokenizeRequest),
        ApiRoute("/detokenize", detokenize, "The text of token ids.", DetokenizeRequest),
        ApiRoute("/tokenizer_info", tokenizer_info, "What a client needs to tokenize by itself."),
    ),
    error_body=plain_body,
    error_schema=PLAIN_SCHEMA,
    stream=StreamForm(
        ping=b": ping\n\n",
        end=b"data: [DONE]\n\n",
        error=lambda error: encode_event(plain_body(error)),
    ),
)
