"""Incremental parsers of an answer's text: reasoning, content and tool calls. Standard library and jinja2."""
