"""An answer's text, taken apart while it comes: reasoning, content and tool calls. Standard library and jinja2."""
