"""Drafters in files of their own that read their model's states, or its keys and values. numpy only.

`eagle3.py`, `dflash.py` and `assistant.py` describe one each; `drafter_files.py` has what they share. `describe.py`:
whatever drafts for a model, these or others.
"""
