"""The engine: the step loop, its frontend, the engine process, and the offline `LLM`."""
