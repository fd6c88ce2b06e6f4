"""Sampling of one row at a time. numpy only."""
