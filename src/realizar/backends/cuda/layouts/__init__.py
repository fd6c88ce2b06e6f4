"""How weights and activations lie in device memory for the tensor cores. numpy only."""
