"""Handlers of OpenAI's endpoints: each turns a request record into chunks or a whole answer.

Read in this order:

1. `completions.py`: `POST /v1/completions`, the simplest that generates.
2. `chat.py`: `POST /v1/chat/completions`. `conversation.py` reads the request as a conversation, its messages
   and tools checked, which `server/generation` plans, runs and parses; `ChatStreamer` makes the chunks.
3. `fields.py`: the fields that both share, those without effect too. `records.py` has the records of the wire.
4. `logprobs.py`: log-probabilities in the formats of both endpoints.
5. `ranking.py`: `/v1/rerank` and `/v1/score`.
6. `routes.py`: the dialect's routes and its form of errors, with the handlers of `/v1/embeddings`, `/v1/models` and
   vLLM's `/tokenize`.
"""
