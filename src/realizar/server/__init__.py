"""The HTTP server: OpenAI's API over an `AsyncEngine`. May import the engine and all below it, never a backend."""
