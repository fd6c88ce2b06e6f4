"""Structured output by JSON schemas, regular expressions, Lark grammars, choices. Only here llguidance is imported.

Read in this order:

1. `grammar.py`: `GrammarFactory` compiles a `Grammar`; a `GrammarMatcher` follows it for one row.
2. `grammar_tokens.py`, `vocabulary.py`: a model's tokens, and their form for llguidance.
3. `grammar_text.py`: the text that llguidance compiles; `lark_schemas.py` prepares JSON schemas inside a Lark grammar.
4. `json_schema.py` reads and bounds a schema. `json_format.py`, `json_numbers.py`, `json_pattern.py`,
   `ascii_classes.py` and `schema_ends.py` narrow, check or rewrite its parts. `lenient.py` leaves out what can't be
   enforced of the schemas of tools that are not strict.
5. `state_masks.py`: masks that rows of one grammar share where they are in the same state. `regex_masks.py` has those
   of an expression, whose states `regex_parse.py` and `regex_states.py` find; `known_states.py` finds all states of a
   small one, by the tokens in `token_columns.py`.
6. `schema_refusal.py`, `kind_names.py`: the errors of refused schemas and grammars.
7. `workers/`: the processes in which the engine compiles and follows grammars.
"""
