"""mixed and async in scripts: the optimizer runs on the global servers."""

import numpy as np
import pytest
from workers import Workers

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("algorithm", "parties", "kind", "steps"),
    [("mixed", (2,), "sgd", ["15"]), ("mixed", (2,), "adam", ["15"]), ("async", (), "sgd", ["6", "3"])],
)
def test_the_servers_compute_what_torch_does(
    workers: Workers, algorithm: str, parties: tuple[int, ...], kind: str, steps: list[str]
) -> None:
    """For two models trained in turn, in one party as in one process (see the script); workers that do not wait for
    each other end with the same models.
    """
    workers.start("server_steps.py", kind, *steps, parties=parties, env={"GEOMX_ALGO": algorithm})
    workers.finish()
    first, second = (workers.saved(rank) for rank in range(2))
    assert len(first) == 4 and all(np.array_equal(first[name], second[name]) for name in first)
