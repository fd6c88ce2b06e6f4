"""Handlers of OpenAI's endpoints: each turns a request record into chunks or a whole answer.

Begin with `completions.py`, the simplest that generates. `chat.py` makes the chunks of conversations, which
`conversation.py` reads and `server/generation` plans, runs and parses. `fields.py` has what both requests share,
`chunks.py` what both answers do, `records.py` bodies and answers, `logprobs.py` log-probabilities. `routes.py` has
the dialect's routes and its form of errors, with the smaller handlers and vLLM's for rerankers, `/v1/rerank` and
`/v1/score`.
"""
