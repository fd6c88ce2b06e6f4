"""Scheduling of steps: the sequences of each, and their tokens. Imports kv_cache and the nouns."""
