"""Writing to a terminal: progress, wrapped text, and texts made safe to print."""
