"""Anthropic's dialect: the Messages API, with its events, its errors and its count of tokens.

Read in this order:

1. `messages.py`: `POST /v1/messages` and `/v1/messages/count_tokens`.
2. `records.py`: their bodies. `conversation.py` reads one as a `Conversation`, with the help of `blocks.py` (content)
   and `tools.py`.
3. `answers.py`: the whole answer and its usage; `stream.py`: the events of a streamed one.
4. `routes.py`: the dialect's routes and its form of errors.
"""
