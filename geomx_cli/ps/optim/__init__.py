"""The optimizers that global servers run on a slice."""
