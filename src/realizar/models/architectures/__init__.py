"""One file for each family: from hyper-parameters to a `ModelSpec`."""
