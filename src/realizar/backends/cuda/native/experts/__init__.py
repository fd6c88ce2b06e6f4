"""CUDA C++ of mixtures of experts, put together by `source.py`.

`choose.cu` has scores and choices of few tokens, `choose_many.cu` those of many, `choice.cu` the choice itself, and
`clusters.cu` what clusters of blocks share, in `native.fp8` too. `matvec.cu` has the mat-vec of pairs, a token and an
expert each, `matvec_sums.cu` that of all of a token's pairs, which adds them to the stream, and `pairs.cu` what both
share.
"""
