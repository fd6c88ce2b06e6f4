"""Generation behind every dialect: prompts, sampling, streams and the computing that they take."""
