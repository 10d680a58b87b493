"""Fixtures of tests with frameworks around PyTorch, which have an environment of their own."""

from pathlib import Path

import pytest
from runs import Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """Runs in the test's folder."""
    return Runs(tmp_path)
