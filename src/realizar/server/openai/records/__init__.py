"""Records of OpenAI's API, one for each endpoint's request and answer."""
