"""Matmuls with packed weights: their kernels' launches, and the linears of a model that share an input."""
