"""OpenAI's Responses API, with its items, its events and its store.

`routes.py` has `POST /v1/responses`, the response object and the events; references to items of kept responses are
resolved there. `records.py` has its body, which `conversation.py` reads as a `Conversation`, with the help of
`reasoning.py` and `tools.py`. `output_items.py` has the items of an answer, `store.py` the kept responses and
their routes.
"""
