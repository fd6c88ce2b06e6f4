"""Steps on the CPU taken apart: times of operations, and values of the residual stream."""
