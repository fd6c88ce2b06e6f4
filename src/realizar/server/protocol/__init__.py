"""Records of the HTTP API, one for each endpoint's request and answer. msgspec and the nouns."""
