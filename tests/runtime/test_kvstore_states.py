"""The optimizer's state, saved from all roots and loaded in another job: training continues bit-identically."""

import json
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster
from mxnet_scripts import hooked

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.optim import optimizers
from geomx_cli.ps.optim.optimizer import PIECE, LocalOptimizer, SerializedArrays, deserialize, digest
from geomx_cli.runtime.script import optimizer_state
from geomx_cli.runtime.script.optimizer_state import SavedState

PARAMS = {"learning_rate": 0.1, "centered": True}
SMALL = {"MXNET_KVSTORE_BIGARRAY_BOUND": "4096"}


def run(directory: Path, phase: str, name: str, way: str, roots: int, local_servers: int = 1) -> Cluster:
    """Run one job; its workers write their results to the directory."""
    cluster = Cluster(directory)
    argv, env = hooked("states.py", phase, name, way)
    try:
        cluster.launch(argv, env=env | SMALL, parties=(1, 1), roots=roots, local_servers=local_servers)
        cluster.finish()
    finally:
        cluster.stop()
    return cluster


def same(directory: Path, one: str, another: str) -> bool:
    """Whether two files of arrays are bit-identical."""
    first, second = np.load(directory / one), np.load(directory / another)
    return first.files == second.files and all(first[name].tobytes() == second[name].tobytes() for name in first.files)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "way", "roots", "load"),
    [("adam", "hand", (2, 3), "load"), ("scheduled", "trainer", (1, 2), "loads")],
)
def test_training_goes_on_as_if_nothing_had_been(
    tmp_path: Path, name: str, way: str, roots: tuple[int, int], load: str
) -> None:
    run(tmp_path, "save", name, way, roots[0])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "no part is left behind"
    if way == "hand":
        about = json.loads(np.load(tmp_path / "states")["geomx"].tobytes())
        assert about["optimizer"] == name and about["keys"]["big"]["dtype"] == "float32"
        assert (tmp_path / "states-last").read_bytes() and not (tmp_path / "torn.npz").exists()
        assert "unused/0/step" not in np.load(tmp_path / "states").files
    run(tmp_path, load, name, way, roots[1], local_servers=2)
    for rank in range(2):
        assert same(tmp_path, "save-0.npz", f"{load}-{rank}.npz")
        assert same(tmp_path, "save-0.npz", f"save-{rank}.npz")


@pytest.mark.processes
def test_the_state_is_that_of_one_process(tmp_path: Path) -> None:
    """After three rounds a file holds the same state as the optimizer in one process."""
    run(tmp_path, "save", "sgd", "hand", 2)
    params = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "rescale_grad": 0.25}
    alone, weights = LocalOptimizer(optimizers.create("sgd", params)), np.random.RandomState(7)
    big = weights.randn(700, 50).astype(np.float32)
    for number in range(3):
        sources = [np.random.RandomState(1000 * number + 10 * rank) for rank in range(2)]
        given = [source.randn(700, 50).astype(np.float32) for source in sources]
        big = alone.update(big, given[0] + given[1])
    state = optimizer_state.read(tmp_path / "states")
    assert state.params["momentum"] == 0.9 and len(state.slices["big"]) > 4
    found = state.cut("big", (0, 35_000))
    assert found["step"] == 3 and np.array_equal(found["momentum"], alone.state["momentum"])
    assert state.slices["half"][0, 120]["master"].dtype == np.float32


def test_who_saves_while_another_loads_has_one_of_the_states(cluster: Cluster) -> None:
    argv, env = hooked("states_race.py")
    cluster.launch(argv, env=env | SMALL, parties=(1, 1), roots=3)
    cluster.finish()
    assert "done 0" in cluster.output("Aw0") + cluster.output("Bw0"), cluster.outputs()


def state_of(cuts: list[tuple[int, int]]) -> SavedState:
    numbers = np.arange(10, dtype=np.float32)
    kept = {
        (at, size): {"step": np.array([3 + at]), "mean": numbers[at : at + size], "variance": -numbers[at : at + size]}
        for at, size in cuts
    }
    return SavedState("adam", PARAMS, {"a/b": "float32"}, {"a/b": kept}, {3: 4, "k": 1})


@pytest.mark.parametrize("cuts", [[(0, 10)], [(0, 4), (4, 3), (7, 3)], [(0, 5), (5, 5)]])
def test_a_file_fits_slices_of_any_cut(tmp_path: Path, cuts: list[tuple[int, int]]) -> None:
    optimizer_state.write(tmp_path / "x", state_of(cuts))
    state = optimizer_state.read(tmp_path / "x")
    assert (state.optimizer, state.params, state.counts) == ("adam", PARAMS, {3: 4, "k": 1})
    for start, size in ((0, 10), (0, 4), (3, 4), (6, 4), (9, 1)):
        found = state.cut("a/b", (start, size))
        assert found["mean"].tolist() == list(range(start, start + size))
        assert (found["variance"] == -found["mean"]).all()
        assert found["step"].shape == (1,)
    with pytest.raises(InvalidSettings, match="does not fit"):
        state.cut("a/b", (8, 5))


def test_a_key_of_which_a_part_was_updated_fits_its_own_cuts_alone() -> None:
    state = state_of([(0, 5), (5, 5)])
    state.slices["a/b"][0, 5] = {}
    assert state.cut("a/b", (0, 5)) == {} and len(state.cut("a/b", (5, 5))) == 3
    with pytest.raises(InvalidSettings, match="does not fit"):
        state.cut("a/b", (0, 10))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "object").open("wb") as file:
        np.savez(file, geomx=np.array([{}], dtype=object))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("momentum")
    for name in ("empty", "text", "object"):
        with pytest.raises(InvalidSettings, match="no whole file"):
            optimizer_state.read(tmp_path / name)
    with pytest.raises(InvalidSettings, match="cannot read"):
        optimizer_state.read(tmp_path / "missing")


def test_arrays_travel_in_pieces() -> None:
    long = np.arange(1_000_003, dtype=np.float32)
    named = {"0/0/step": np.array([7]), "0/0/momentum": long, "1/2/master": np.ones(5)}
    packed = SerializedArrays(named)
    pieces = [piece for _, piece in packed.pieces()]
    assert all(0 < len(piece) <= PIECE for piece in pieces) and sum(map(len, pieces)) == packed.size
    run = b"".join(pieces)
    assert digest(run) == packed.digest()
    for name, array in deserialize(run).items():
        assert np.array_equal(array, named[name]) and array.dtype == named[name].dtype
    assert deserialize(b"".join(piece for _, piece in SerializedArrays({}).pieces())) == {}


@pytest.mark.parametrize(
    "wrong", [b"", b"\xff" * 30, b"\x02" + b"\0" * 9, SerializedArrays({"a": np.ones(3)}).piece(0)[:-1]]
)
def test_a_malformed_run_is_refused(wrong: bytes) -> None:
    with pytest.raises(InvalidSettings):
        deserialize(wrong)
