"""The callers' side of an engine takes requests and gives text."""
