"""The tests of tools through the official client, by two replicas."""

from server.openai.test_tools import *  # noqa: F403 - the fixtures of this folder make the server
