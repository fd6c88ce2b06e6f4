"""The engine: the step loop, its clients, the engine process, and the offline `LLM`."""
