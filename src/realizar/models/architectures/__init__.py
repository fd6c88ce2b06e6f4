"""One file for each family turns hyper-parameters into a `ModelSpec`."""
