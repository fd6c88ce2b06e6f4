"""Steps on a GPU taken apart: times of launches, and values of the residual stream. torch."""
