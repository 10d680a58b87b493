"""Codecs: what each makes of an array, what is refused, and rounds of real clusters against numpy."""

from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster
from hypothesis import given
from hypothesis import strategies as st
from test_exact import SCRIPT, SIZES, assert_equal, gradient, initial, run
from test_in_flight import check_rounds
from test_mxnet_store import hooked
from tree import Tree

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.compression import parse_codec
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import BadMessage
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.algorithms.hfa import HfaServer

BITS = {"fp16": 11, "bf16": 8}
Array = np.ndarray


def rounded(array: Array, bits: int) -> Array:
    """Each element with so many significant bits, to nearest even."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(array.dtype)


def there_and_back(spec: str, array: Array) -> Array:
    codec = parse_codec(spec)
    assert codec is not None
    payload = codec.encode(array)
    assert len(payload) <= 2 * len(array) + 2
    return codec.decode(payload, len(array))


@pytest.mark.parametrize("spec", BITS)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 300), scale=st.integers(-100, 100), wide=st.booleans())
def test_codecs_round_to_nearest(spec: str, seed: int, size: int, scale: int, wide: bool) -> None:
    array = np.random.default_rng(seed).standard_normal(size) * 2.0**scale
    array[np.abs(array) < 2.0 ** (scale - 20)] = 0
    array = array.astype(np.float64 if wide else np.float32)
    wanted = rounded(array.astype(np.float32) if spec == "bf16" else array, BITS[spec])
    assert np.array_equal(there_and_back(spec, array), wanted.astype(np.float32))


@pytest.mark.parametrize("spec", BITS)
def test_what_is_not_finite_stays_what_it_is(spec: str) -> None:
    array = np.array([np.inf, -np.inf, np.nan, -np.nan, 1.5, 0, -0.0, 3e38, 1e-45], np.float32)
    array[3:4].view(np.uint32)[:] = 0xFFFFFFFF  # a NaN that rounding of its bits would carry into a zero
    found = there_and_back(spec, array)
    assert np.array_equal(np.isnan(found), np.isnan(array))
    assert np.array_equal(found[[0, 1, 5, 6]], array[[0, 1, 5, 6]])
    assert np.signbit(found[6])
    assert np.isclose(found[7], 3e38, rtol=0.01)
    assert np.array_equal(there_and_back(spec, np.full(3, np.nan, np.float32)), np.full(3, np.nan), equal_nan=True)


@pytest.mark.parametrize("values", [(1e-9, 3e-8, -2e-10), (7e4, -3e9, 1e8)])
def test_fp16_keeps_what_would_vanish_or_overflow_in_half_precision(values: tuple[float, ...]) -> None:
    array = np.array(values, np.float32)
    assert np.array_equal(there_and_back("fp16", array), rounded(array, 11))


@pytest.mark.parametrize("spec", BITS)
def test_malformed_payloads(spec: str) -> None:
    codec = parse_codec(spec)
    assert codec is not None
    payload = bytes(codec.encode(np.ones(5, np.float32)))
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(BadMessage):
            codec.decode(memoryview(wrong), 5)
    if spec == "fp16":
        with pytest.raises(BadMessage, match="exponent 32767"):
            codec.decode(memoryview(payload[:-2] + b"\xff\x7f"), 5)


@pytest.mark.parametrize("spec", ["fp17", "fp16:2", "bf16:x", ":", "none:1", "fp16" + " " * 100])
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(InvalidSettings):
        parse_codec(spec)


def test_every_codec_is_among_the_tested() -> None:
    assert set(plugins.codecs()) == set(BITS)


def expected(parties: list[list[int]], bits: int, *, optimizer: bool, central: tuple[int, ...] = ()) -> list[Array]:
    """Five rounds: parties' sums and every result are rounded, the global weights and central workers' are not."""
    results = []
    for index, size in enumerate(SIZES):
        weight, momentum = initial(size, index), np.zeros(size, np.float32)
        for number in range(5):
            sums = []
            for party in parties:
                members = [gradient(rank, number, size, index) for rank in party]
                sums.append(rounded(sum(members[1:], members[0]), bits))
            sums += [gradient(rank, number, size, index) for rank in central]
            total = sum(sums[1:], sums[0])
            if optimizer:
                momentum = np.float32(0.9) * momentum - np.float32(0.1) * (np.float32(0.25) * total)
                weight = weight + momentum
            else:
                weight = total
        results.append(rounded(weight, bits))
    return results


@pytest.mark.parametrize(
    ("spec", "optimizer", "shape"),
    [("fp16", True, {"roots": 2}), ("fp16", False, {"local_servers": 2}), ("bf16", True, {})],
)
def test_rounds_of_a_cluster(cluster: Cluster, tmp_path: Path, spec: str, optimizer: bool, shape: dict) -> None:
    env = {"GEOMX_COMPRESS": spec, "SHUFFLE": "1", "SERVER_OPTIMIZER": "1" if optimizer else ""}
    found = run(cluster, tmp_path, env, **shape)
    assert_equal(found, expected([[0, 1], [2, 3]], BITS[spec], optimizer=optimizer))


def test_central_workers_get_what_the_others_get(cluster: Cluster, tmp_path: Path) -> None:
    found = run(cluster, tmp_path, {"GEOMX_COMPRESS": "fp16"}, central_workers=2)
    assert len(found) == 6
    assert_equal(found, expected([[0, 1], [2, 3]], 11, optimizer=True, central=(4, 5)))


def test_workers_of_a_flat_cluster_encode(cluster: Cluster, tmp_path: Path) -> None:
    out = str(tmp_path / "w{rank}.npz")
    cluster.environment = {"OUT": out, "SHUFFLE": "1", "SERVER_OPTIMIZER": "1", "GEOMX_COMPRESS": "fp16"}
    cluster.launch_flat(SCRIPT, servers=2)
    cluster.finish()
    found = {int(path.stem[1:]): list(np.load(path).values()) for path in tmp_path.glob("w*.npz")}
    assert_equal(found, expected([[0], [1], [2], [3]], 11, optimizer=True))


def test_hfa_rounds_differences_and_milestones() -> None:
    def normal(*seed: int) -> Array:
        return np.random.default_rng(seed).standard_normal(8).astype(np.float32)

    tree = Tree([2, 2], lambda workers, is_root: HfaServer(2, workers, by_samples=False), compress="fp16")
    world = normal(9)
    tree.init(world)
    for party in (0, 1):
        tree.pull((party, 0))
        assert tree.last((party, 0)).tobytes() == world.tobytes()
    milestone = world
    for number in range(1, 7):
        means = []
        for party in (0, 1):
            given = [normal(number, party, rank) / np.float32(2) for rank in (0, 1)]
            for rank in (0, 1):
                tree.push((party, rank), number, given[rank])
            means.append(given[0] + given[1])
        if number % 2 == 0:
            total = rounded(means[0] - milestone, 11) + rounded(means[1] - milestone, 11)
            world = world + total / np.float32(2)
            milestone = rounded(world, 11)
            means = [milestone, milestone]
        for party in (0, 1):
            assert tree.last((party, 1)).tobytes() == means[party].tobytes()
    assert set(tree.crossed) == {0, 32, 18}


def test_parties_that_train_asynchronously_pull_the_newest_value_rounded() -> None:
    tree = Tree([1, 1], lambda _, __: FsaServer(asynchronous=True), central=1, compress="fp16")
    tree.use("sgd", learning_rate=1.0)
    weight = np.linspace(1, 2, 8, dtype=np.float32) / np.float32(3)
    tree.init(weight)
    tree.push((0, 0), 1, weight)
    after = weight - rounded(weight, 11)
    assert tree.last((0, 0)).tobytes() == rounded(after, 11).tobytes()
    tree.push((1, 0), 1, weight * np.float32(-2))
    newest = after - rounded(weight * np.float32(-2), 11)
    for who in ((0, 0), (-1, 0)):
        tree.pull(who, number=1)
        assert tree.last(who).tobytes() == rounded(newest, 11).tobytes()


def test_rows_are_not_encoded() -> None:
    tree = Tree([1], lambda _, __: FsaServer(), row=2, compress="fp16")
    value = np.linspace(1, 2, 8, dtype=np.float32) / np.float32(3)
    tree.init(value)
    rows = Rows(np.array([1, 3]), value.reshape(-1, 2)[[1, 3]])
    tree.push((0, 0), 1, rows)
    tree.pull((0, 0), number=1, rows=np.array([1, 3]))
    assert tree.last((0, 0)).values.tobytes() == rows.values.tobytes()


@pytest.mark.parametrize("who", ["workers", "master"])
def test_a_script_asks_for_compression(cluster: Cluster, who: str) -> None:
    argv, env = hooked("compressed.py", who)
    cluster.launch(argv, env=env, roots=2, local_servers=2)
    cluster.finish()


def test_a_script_asks_for_compression_in_a_flat_cluster(cluster: Cluster) -> None:
    argv, env = hooked("compressed.py", "workers")
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(4)}
    cluster.launch_flat(argv, workers=4, servers=2, env=env, worker_env=ranks)
    cluster.finish()


def test_every_round_is_right_though_links_are_cut(cluster: Cluster, tmp_path: Path) -> None:
    env = {"GEOMX_COMPRESS": "fp16"}
    check_rounds(cluster, tmp_path, 2, "both", optimizer=True, row=0, crossed=lambda array: rounded(array, 11), **env)
