"""A model that several processes compute together, each a part of every sum.

1. `backend.py`: the `Backend` of the engine's process, the first rank. It starts the others and sends them each call.
2. `process.py`: another rank's process, which makes the same calls of its own backend.
3. `messages.py`: what they say to each other.
"""
