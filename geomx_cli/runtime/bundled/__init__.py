"""The bundled training job: what a worker runs without a script."""
