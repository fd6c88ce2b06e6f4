"""Measurements of our own decode and prefill, of other programs, and of the machine's limits. Nothing prints here."""
