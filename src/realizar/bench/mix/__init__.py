"""A load of mixed kinds of requests, as a server's users send them: drawn, sent, timed and reported by kind."""
