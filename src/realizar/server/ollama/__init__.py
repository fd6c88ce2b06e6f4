"""Ollama's dialect: chat, generation, embeddings and lists of models, with streams of lines of JSON.

Read in this order:

1. `routes.py`: the dialect's routes and its form of errors, with the handlers of `/api/chat`, `/api/generate` and
   `/api/embed`, the lines of answers, and the routes that would change models.
2. `records.py`: their bodies. `conversation.py` reads one as a `Conversation`, with its options of sampling and the
   help of `messages.py`.
3. `parts.py`: the parts that an answer is made of; `times.py`: its durations.
4. `listing.py`: the models and what they are; `names.py`: how a name finds its model.
"""
