"""First on a process's path: there is no MXNet."""

raise ModuleNotFoundError("No module named 'mxnet'", name="mxnet")
