"""Several API processes behind one port: the main process keeps the engine and all that is counted over all of them."""
