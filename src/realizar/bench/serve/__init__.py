"""Loads on servers: requests of one kind or of many, drawn, sent, timed, reported and compared."""
