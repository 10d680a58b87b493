"""The optimizers that global servers run on slices."""
