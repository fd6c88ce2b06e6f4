"""Measures how far every architecture is from transformers, and writes `docs/parity.md`: `make parity`."""
