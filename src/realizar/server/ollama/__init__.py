"""Ollama's dialect: chat, generation, embeddings and lists of models, with streams of lines of JSON.

`routes.py` has the handlers, the parts and lines of answers, `records.py` their bodies, which `conversation.py` reads
as a `Conversation`, with the help of `messages.py`. `times.py` has an answer's durations; `listing.py` tells what
models are, and `names.py` how a name finds its model.
"""
