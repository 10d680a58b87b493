"""Fixtures of tests with PyTorch, which run where MXNet is not installed."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from workers import Workers

assert importlib.util.find_spec("mxnet") is None, "PyTorch scripts must not need MXNet"


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts a script of scripts/ in workers; remaining processes are killed at the end."""
    cluster = Cluster(tmp_path, imported="torch")
    yield Workers(cluster)
    cluster.stop()
