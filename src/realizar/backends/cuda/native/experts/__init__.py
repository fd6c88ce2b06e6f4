"""CUDA C++ of mixtures of experts, put together by `source.py`.

`choose.cu` has scores and choices of few tokens, `choose_many.cu` those of many, `choice.cu` the choice itself, and
`clusters.cu` what clusters of blocks share. `matvec.cu` has the mat-vec of pairs, a token and an expert each.
"""
