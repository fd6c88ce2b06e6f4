"""What travels over HTTP: a record per endpoint, checked before anything runs. msgspec and the nouns."""
