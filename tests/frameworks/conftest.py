"""Fixtures of tests with frameworks around PyTorch, which have an environment of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import Desk
from runs import Runs

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported, which is before processes are forked


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Runs in the test's folder; what still runs at the end is killed."""
    made = Runs(Desk(tmp_path))
    yield made
    made.desk.close()
