"""The tests of chat through the official client, by two replicas."""

from server.openai.test_chat import *  # noqa: F403 - the fixtures of this folder make the server
