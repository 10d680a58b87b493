"""Agents that end with the test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lone_agent import Agent


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Any]:
    """Starts an agent, which is killed at the end of the test."""
    made: list[Agent] = []

    def start(lease: float = 6, grace: float = 2, restarts: int = 0, **programs: str) -> Agent:
        made.append(Agent(tmp_path, lease, grace, restarts, **programs))
        return made[-1]

    yield start
    for agent in made:
        agent.close()
