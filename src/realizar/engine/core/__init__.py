"""The step loop: token ids in, token ids out."""
