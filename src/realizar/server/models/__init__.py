"""The models of one server: how a request finds its model, and how long it keeps it."""
