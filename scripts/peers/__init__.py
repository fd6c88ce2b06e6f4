"""Decode and prefill beside llama.cpp and ik_llama.cpp: `make bench-peers`."""
