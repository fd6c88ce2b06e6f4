"""The HTTP server: OpenAI's API over an `AsyncEngine`. It may import the engine and layers below, but no backend."""
