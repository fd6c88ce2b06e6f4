"""Anthropic's dialect: the Messages API, with its events, its errors and its count of tokens.

Read in this order:

1. `routes.py`: `POST /v1/messages` and `/v1/messages/count_tokens`, whole answers and events, and the dialect's form of
   errors.
2. `records.py`: their bodies. `conversation.py` reads one as a `Conversation`: messages, blocks of content, tools.
"""
