"""Shadows MXNet on a process's path, as if it were not installed."""

raise ModuleNotFoundError("No module named 'mxnet'", name="mxnet")
