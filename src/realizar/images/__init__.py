"""Images as clients send them: decoded within bounds, and prepared as a model's own processor does it."""
