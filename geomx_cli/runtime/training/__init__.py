"""What algorithms, front ends and the bundled job share: models, local steps, the worker side of an algorithm."""
