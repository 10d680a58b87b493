"""Callbacks of frameworks that own the training loop; each module imports its framework, so none is imported here."""
