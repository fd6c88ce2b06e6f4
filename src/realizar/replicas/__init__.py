"""Several engines behind one API: which of them a request goes to, and how they start, end and are replaced."""
