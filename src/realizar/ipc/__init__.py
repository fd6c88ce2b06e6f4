"""How the processes of a server speak with each other, and end together."""
