"""Which sequences take part in the next step, and with how many tokens. Imports kv_cache and the nouns."""
