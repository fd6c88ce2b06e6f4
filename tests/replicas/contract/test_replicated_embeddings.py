"""The tests of embeddings through the official client, by two replicas."""

from server.openai.test_embeddings import *  # noqa: F403 - the fixtures of this folder make the server
