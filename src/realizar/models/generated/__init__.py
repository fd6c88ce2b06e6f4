"""Models of random weights in the shapes of real ones, for benchmarks, for tests, and for trying a device out."""
