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


def test_rates_after_a_loaded_state(workers: Workers) -> None:
    workers.start("groups.py", count=1, env={"GEOMX_ALGO": "async"})
    workers.finish()


def test_who_brings_nan_is_said(workers: Workers) -> None:
    workers.start("damaged.py", parties=(1, 1), env={"GEOMX_ALGO": "mixed"})
    workers.finish()
    said = "has elements that are not finite here in step 5, so all workers' weights have them from now on"
    assert [workers.cluster.output(name).count(said) for name in ("Aw0", "Bw0")] == [0, 1], workers.cluster.outputs()
