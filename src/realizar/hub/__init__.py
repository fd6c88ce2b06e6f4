"""Models by name: downloads and the cache on disk. This package imports only the nouns and never prints."""
