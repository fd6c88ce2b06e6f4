"""Drafters in files of their own that read their model's streams. numpy only.

`eagle3.py` and `dflash.py` describe one each; `drafter_files.py` has what they share.
"""
