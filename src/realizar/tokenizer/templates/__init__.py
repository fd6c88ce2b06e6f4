"""Chat templates: stored, rendered in a sandbox, and kept within bounds."""
