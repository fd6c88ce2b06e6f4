"""Handlers of OpenAI's endpoints: each turns a request record into chunks or a whole answer.

Read in this order:

1. `completions.py`, `completion_run.py`: `POST /v1/completions`, the simplest that generates.
2. `chat.py`: `POST /v1/chat/completions`. `conversation.py` reads the request as a conversation, which
   `server/generation` plans, runs and parses; `chat_stream.py` makes the chunks.
3. `messages.py`, `tools.py`, `structured.py`, `wishes.py`: the parts of a request, checked; `neutral.py` has the fields
   without effect. `records/` has the records of the wire.
4. `logprobs.py`: log-probabilities in the formats of both endpoints.
5. `embeddings.py`, `models.py`: `POST /v1/embeddings` and `GET /v1/models`; `ranking.py`: `/v1/rerank` and
   `/v1/score`; `tokenizer_routes.py`: vLLM's `/tokenize`.
6. `routes.py`: the dialect's routes and its form of errors.
"""
