"""The data sets that geomx knows, and a worker's part of one: for scripts, `geomx data` and the bundled job."""
