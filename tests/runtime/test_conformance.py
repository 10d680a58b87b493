"""Unmodified scripts in the style of MXNet's tests and tutorials: stock MXNet and geomx give the same results.

Each runs under stock MXNet 1.9.1, with its scheduler, server and two workers, and as a job of ours with two workers.
Sums of two workers have the same bits in any order, and our servers compute as MXNet's operators do, so the weights are
compared bit by bit, unless a case gives a reason not to; and so is each worker's memory, within bounds.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from stock import LIMIT, Outcome, Script, with_geomx, with_mxnet

MEMORY = 1.3
pytestmark = pytest.mark.processes
TOPOLOGIES = ("flat", "central", "spread")


@dataclass(frozen=True)
class Case:
    """A script, the tolerance for its weights (relative to each array's largest element), and the reason for it.

    topologies: all for a script that uses the servers in its own way. One for those that reach them as another does, or
    that have their optimizer on the worker.
    """

    script: Script
    tolerance: float = 0.0
    why: str = ""
    topologies: tuple[str, ...] = TOPOLOGIES

    def __str__(self) -> str:
        return str(self.script)


CASES = [
    Case(Script("kvstore", ("dist_sync",))),
    Case(Script("row_sparse")),
    Case(Script("trainer", ("sgd",)), topologies=("central",)),
    Case(Script("module")),
    Case(Script("feedforward"), topologies=("spread",)),
    Case(Script("estimator"), topologies=("flat",)),
    Case(Script("optimizers", ("server",))),
    Case(Script("half")),
    Case(Script("two_bit")),
    Case(Script("asynchronous")),
    Case(Script("embedding"), 1e-6, "MXNet's operator for sparse gradients rounds in another order"),
    Case(Script("optimizers", ("worker",)), topologies=("spread",)),
    Case(Script("trainer", ("adam",)), topologies=("flat",)),
    Case(Script("trainer", ("lamb",)), topologies=("spread",)),
    Case(Script("trainer_states")),
    Case(Script("other_optimizer", ("test",)), topologies=("central",)),
]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session folder shared by all processes that run the session's tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "stock"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.timeout(2 * LIMIT + 20)
@pytest.mark.parametrize(
    ("case", "topology"), [(case, topology) for case in CASES for topology in case.topologies], ids=str
)
def test_a_script_gives_the_same_weights(case: Case, topology: str, tmp_path: Path, cache: Path) -> None:
    options = {"topology": topology} | ({} if topology == "flat" else {"rank_scope": "global"})
    assert_alike(with_geomx(case.script, tmp_path, options), with_mxnet(case.script, cache), case)


def assert_alike(ours: Outcome, theirs: Outcome, case: Case) -> None:
    """Every rank has the same weights as under MXNet, and takes little more memory."""
    for rank, wanted_of_rank in enumerate(theirs.weights):
        assert ours.weights[rank].keys() == wanted_of_rank.keys() and len(wanted_of_rank) > 0
        for name, wanted in wanted_of_rank.items():
            found = ours.weights[rank][name]
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
            largest = case.tolerance * float(np.abs(wanted).max())
            np.testing.assert_allclose(found, wanted, rtol=0, atol=largest, err_msg=f"rank {rank}: {name}")
    assert 0 < ours.memory <= MEMORY * theirs.memory, f"{ours.memory} KiB, where MXNet takes {theirs.memory}"
