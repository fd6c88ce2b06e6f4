"""Finding and fetching models: names, downloads, the cache on disk. Imports the nouns only; never prints."""
