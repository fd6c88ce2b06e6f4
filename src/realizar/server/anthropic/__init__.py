"""Anthropic's dialect: the Messages API, with its events, its errors and its count of tokens.

`routes.py` has the routes, whole answers and events, and the dialect's form of errors; `records.py` their bodies, which
`conversation.py` reads as a `Conversation`: messages, blocks of content, tools.
"""
