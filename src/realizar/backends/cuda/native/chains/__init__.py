"""Dense matmuls of few tokens that follow each other, in one launch on Hopper.

Read `links.cu` (what a block waits for, and what a matrix ends with), `format.cu` (requests and products of one weight
format) and `begin.cu`; `source.py` puts their texts together for a chain.
"""
