"""Structured output by JSON schemas, regular expressions, Lark grammars, choices. Only here llguidance is imported.

Read in this order:

1. `grammar.py`: `GrammarFactory` compiles a `Grammar`, from the text that `grammar_text` makes; a `GrammarMatcher`
   follows it for one row, and within strings makes its masks of earlier ones. `grammar_tokens.py` has a model's tokens.
2. `json_schema.py` reads and bounds a schema, narrows, checks or rewrites its parts, with `ascii_classes.py`, and finds
   its free strings.
   `lark_schemas.py` prepares schemas inside a Lark grammar, such as those of tools.
3. `regex_masks.py`: masks that rows of an expression share where they are in the same state; `known_states.py` finds
   all states of a small one.
4. `workers/`: the processes in which the engine compiles and follows grammars.
"""
