"""The time after which a test's wait is a hang. A busy machine may take minutes for what an idle one does at once."""

HANG_S = 600.0
"""Seconds. Nothing is measured by it: a wait that ends well ends as soon as its condition holds."""
