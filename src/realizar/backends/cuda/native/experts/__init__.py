"""CUDA C++ of mixtures of experts.

`matvec.cu` is the mat-vec of pairs, tokens with one of their experts each; `source.py` puts it together.
"""
