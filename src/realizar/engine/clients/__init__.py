"""The callers' side of an engine: requests in, text out."""
