"""Who owns which block of the KV cache: integers only; the memory is the backend's."""
