"""Output that follows a grammar: JSON schema, regular expression, Lark, choices. The only home of llguidance."""
