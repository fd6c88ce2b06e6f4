"""HTTP without any dialect: bodies, events, keys, connections, logs."""
