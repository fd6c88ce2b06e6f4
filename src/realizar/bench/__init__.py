"""Measurements: our own decode and prefill, peers beside us, and the limits of the machine. Prints nothing."""
