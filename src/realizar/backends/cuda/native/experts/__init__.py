"""CUDA C++ of mixtures of experts, put together by `source.py`.

`choose.cu` has scores and choices of few tokens, `matvec.cu` the mat-vec of pairs, a token and an expert each.
"""
