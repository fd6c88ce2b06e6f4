"""Options that several commands share, and the values that they become."""
