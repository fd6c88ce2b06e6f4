"""Structured output by JSON schemas, regular expressions, Lark grammars, choices. Only here llguidance is imported."""
