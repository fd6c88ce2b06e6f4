"""The step loop, and what stands around it: requests in, tokens to text, the offline `LLM`."""
