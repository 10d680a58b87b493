"""MixedSync and its flat form: no member waits for slow ones beyond `--max-staleness`; slices are read whole."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from bench import Bench
from cluster import ROOT, Cluster
from tree import Tree, Who

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.payload import view
from geomx_cli.ps.net.wire import Kind
from geomx_cli.ps.operation_queue import PendingExchange
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.algorithms.mixed import MixedServer

SCRIPT = [sys.executable, str(ROOT / "tests/scripts/averages.py")]
RATE = 0.125
SGD = json.dumps(["sgd", {"learning_rate": RATE}])


def tree(parties: list[int], bound: int = -1, **shape: int) -> Tree:
    made = Tree(parties, lambda *_: FsaServer(asynchronous=True, max_staleness=bound), **shape)  # type: ignore[arg-type]
    return made.use("sgd", learning_rate=RATE)


def full(number: float) -> Array:
    return np.full(8, number, np.float32)


def gradient(rank: int, number: int) -> Array:
    return np.random.default_rng([rank, number]).standard_normal(8).astype(np.float32)


# Rules, in one process.


def test_each_party_is_applied_alone_as_it_comes_and_answered_alone() -> None:
    """Against momentum in numpy, with the parties' sums in random order."""
    job = tree([2, 1]).use("sgd", learning_rate=RATE, momentum=0.5)
    weight, momentum, rounds = np.ones(8, np.float32), np.zeros(8, np.float32), [0, 0]
    job.init(weight)
    for update, party in enumerate(random.Random(3).choices((0, 1), k=20), 1):
        rounds[party] += 1
        members = [0, 1] if party == 0 else [0]
        for rank in members:
            job.push((party, rank), rounds[party], gradient(2 * party + rank, rounds[party]))
        given = [gradient(2 * party + rank, rounds[party]) for rank in members]
        total = given[0] if len(given) == 1 else given[0] + given[1]
        momentum = np.float32(0.5) * momentum - np.float32(RATE) * total
        weight = weight + momentum
        for rank in members:
            newest = job.got((party, rank))[-1]
            assert newest.value.tobytes() == weight.tobytes()
            assert (newest.round, newest.version, newest.contributors) == (rounds[party], update, (party,))
        assert [len(job.got((which, 0))) for which in (0, 1)] == rounds, "nobody else is told"


def test_a_straggling_party_delays_nobody() -> None:
    job = tree([1, 1])
    job.init(full(0))
    for number in range(1, 41):
        job.push((0, 0), number, full(1))
        assert (job.last((0, 0)) == -RATE * number).all()
    job.push((1, 0), 1, full(8))
    assert (job.last((1, 0)) == -RATE * 48).all()
    assert job.roots[0].rounds.table.finished == {1: 40, 2: 1}


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_further_ahead_than_the_bound(bound: int, seed: int) -> None:
    """Parties of very different speeds, which push as soon as they may; in the end all have completed all rounds."""
    job, chance, rounds = tree([1, 2, 1], bound), random.Random(seed), 12
    job.init(full(0))
    workers: list[Who] = [(0, 0), (1, 0), (1, 1), (2, 0)]
    begun, furthest = dict.fromkeys(workers, 0), 0
    while min(begun.values()) < rounds:
        free = [who for who in workers if len(job.got(who)) == begun[who] < rounds]
        who = chance.choices(free, [10 ** (2 - party) for party, _ in free])[0]
        begun[who] += 1
        job.push(who, begun[who], full(1))
        slowest = min(begun.values())
        ahead = max(len(job.got(one)) for one in workers) - slowest
        assert ahead <= bound
        furthest = max(furthest, ahead)
    assert furthest == bound, "the bound is used"
    assert {len(job.got(who)) for who in workers} == {rounds}


def test_a_bound_of_0_is_lock_step() -> None:
    """All have received the same weights in each round, with all updates of that round."""
    job = tree([1, 1], 0)
    job.init(full(0))
    for number in range(1, 5):
        for party in ((0, 1), (1, 0))[number % 2]:
            job.push((party, 0), number, full(1 + party))
        assert all((job.last((party, 0)) == -RATE * 3 * number).all() for party in (0, 1))
        assert [result.version for result in job.got((0, 0))] == [2 * count for count in range(1, number + 1)]


def test_who_waits_is_told_as_soon_as_the_slow_one_comes_or_leaves() -> None:
    job = tree([1, 1, 1], 1)
    job.init(full(0))
    job.push((0, 0), 1, full(1))
    job.push((0, 0), 2, full(1))
    job.push((0, 0), 2, full(1))
    assert len(job.got((0, 0))) == 1, "a repeat changes nothing"
    waits = job.roots[0].rounds.table.oldest()
    assert waits is not None and (waits[0], waits[2]) == (2, {1, 2})
    job.push((1, 0), 1, full(2))
    waits = job.roots[0].rounds.table.oldest()
    assert waits is not None and waits[2] == {2}
    job.leave((2, 0))
    assert job.roots[0].rounds.table.oldest() is None
    assert (job.last((0, 0)) == -RATE * 4).all(), "what has come meanwhile is in it"
    job.push((0, 0), 3, full(1))
    assert len(job.got((0, 0))) == 2
    job.leave((1, 0))
    assert (job.last((0, 0)) == -RATE * 5).all()
    for number in range(4, 9):
        job.push((0, 0), number, full(1))
    assert len(job.got((0, 0))) == 8, "alone it may go as far as it likes"


def test_a_result_that_was_held_back_is_what_its_party_has_seen() -> None:
    """DC-ASGD compensates for changes since the weights last sent to the party, which may be newer than its own update.
    """
    lamda = np.float32(0.5)
    job = tree([1, 1], 0).use("dcasgd", learning_rate=RATE, lamda=float(lamda))
    weight = np.ones(8, np.float32)
    job.init(weight)
    seen = [weight, weight]
    for number in range(1, 6):
        for party in ((0, 1), (1, 0))[number % 2]:
            g = gradient(party, number)
            job.push((party, 0), number, g)
            weight = weight - np.float32(RATE) * (g + lamda * g * g * (weight - seen[party]))
        seen = [weight, weight]
        for party in (0, 1):
            np.testing.assert_allclose(job.last((party, 0)), weight, rtol=1e-6, atol=1e-6)


def test_central_workers_are_one_member_together() -> None:
    job = tree([1], central=2)
    job.init(full(0))
    job.push((-1, 0), 1, full(1))
    job.push((0, 0), 1, full(4))
    assert job.got((-1, 0)) == [] and (job.last((0, 0)) == -RATE * 4).all()
    job.push((-1, 1), 1, full(2))
    for rank in (0, 1):
        newest = job.got((-1, rank))[-1]
        assert (newest.value == -RATE * 7).all() and newest.version == 2 and newest.weight == 2


def test_what_comes_before_the_job_is_made_asynchronous_counts_alone_too() -> None:
    """The master's script requests it by its store's type, after faster workers have pushed."""
    job = Tree([1, 1, 1], lambda *_: FsaServer()).use("sgd", learning_rate=RATE)
    job.push((2, 0), 1, full(4))
    job.push((1, 0), 1, full(2))
    job.init(full(0), (1, 0))
    job.push((1, 0), 1, full(2), (1, 0))
    assert job.roots[0].rounds.switch_to_async()
    job.init(full(0))
    job.push((0, 0), 1, full(1), (1, 0))
    for party, where, wanted in ((2, (0, 0), 4), (1, (0, 0), 6), (1, (1, 0), 2), (0, (1, 0), 3)):
        (result,) = job.got((party, 0), where)
        assert result.contributors == (party,) and (result.value == -RATE * wanted).all()
    assert not job.got((0, 0)) and job.roots[0].rounds.switch_to_async()
    job = Tree([1, 1], lambda *_: FsaServer())
    job.push((0, 0), 1, full(4))
    assert not job.roots[0].rounds.switch_to_async(), "it is the beginning of a sum"


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "dcasgd"])
def test_each_slice_is_read_at_one_version_wherever_a_writer_comes(optimizer: str) -> None:
    """A read of four slices with an update of all of them at every point of it; answers are read at the end."""
    count = 4
    for point in range(count + 1):
        bench = Bench(optimizer, algorithm=FsaServer(asynchronous=True))
        start = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
        for index in range(count):
            header = bench.header(Kind.PUSH, slice=index)
            bench.rounds.values.on_push(bench.links[0], header, start.data.cast("B"))  # type: ignore[arg-type]
        bench.delivery.downs.clear()
        for index in range(count + 1):
            if index == point:
                for written in range(count):
                    for number in (1, 2):
                        bench.push(1, number, np.ones(1000, np.float32), slice=written)
            if index < count:
                bench.rounds.values.on_pull(bench.links[0], bench.header(Kind.PULL, slice=index), 0)  # type: ignore[arg-type]
        answers = {link: [item for item in bench.delivery.downs if item[0] is link] for link in bench.links}
        values = {0: start, 2: view(*answers[bench.links[1]][-1][1:])}
        exchange = PendingExchange(np.zeros(1000 * count, np.float32), count)
        for _, header, payload in answers[bench.links[0]]:
            value = view(header, payload)
            assert header.value == (0 if header.slice < point else 2)
            assert value.tobytes() == values[header.value].tobytes(), "the whole slice is of that version"
            exchange.add(1000 * header.slice, value, header.value)
        assert exchange.done.done()
        assert (exchange.lowest, exchange.highest) == (2 if point == 0 else 0, 0 if point == count else 2)


# Who is done.


def reported(server: MixedServer, **fields: object) -> object:
    body = {"rank": 0, "workers": 2, "done": False, "stop": False, **fields}
    return server.on_request("completion", body, True)


def test_the_root_counts_the_workers_that_are_done() -> None:
    server = MixedServer()
    assert reported(server) == {"missing": 2, "stop": False}
    for _ in range(2):
        assert reported(server, rank=1, done=True) == {"missing": 1, "stop": False}, "twice is once"
    assert reported(server, stop=True) == {"missing": 1, "stop": True}
    assert reported(server, rank=1, done=True) == {"missing": 1, "stop": True}
    assert reported(server, done=True) == {"missing": 0, "stop": True}
    assert server.on_request("completion", {}, False) is None, "a local server relays it"


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": -1}, {"rank": 2}, {"rank": True}, {"rank": "0"}, {"workers": 0}, {"workers": 1 << 20},
        {"workers": 2.0}, {"done": 1}, {"stop": None}, {"stop": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_a_report_that_makes_no_sense_changes_nothing(fields: dict[str, object]) -> None:
    server = MixedServer()
    with pytest.raises(InvalidSettings):
        reported(server, **{"done": True, "stop": True, **fields})
    assert reported(server) == {"missing": 2, "stop": False}


# Clusters.


def saved(folder: Path) -> dict[int, dict[str, Array]]:
    return {int(path.stem[1:]): dict(np.load(path)) for path in folder.glob("w*.npz")}


def test_a_cluster_whose_second_party_comes_late(cluster: Cluster, tmp_path: Path) -> None:
    """It begins when the first one is in its fifth round; the central workers form a separate cohort."""
    gate = str(tmp_path / "gate")
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "GEOMX_ALGO": "mixed", "OPTIMIZER": SGD, "PUSH": "ranks", "ROUNDS": "5",
        "SIZES": "5000,3", "MXNET_KVSTORE_BIGARRAY_BOUND": "1024", "GEOMX_HEARTBEAT": "0.1",
    }  # fmt: skip
    cluster.each = {
        "root0": {"GEOMX_JOB_DIR": str(tmp_path), "GEOMX_PROCESS": "root0", "GEOMX_PARTY": "central"},
        "Asrv0": {"GEOMX_PARTY": "A"},
        "Bsrv0": {"GEOMX_PARTY": "B"},
        "Aw0": {"OPENS": f"5={gate}"},
        "Bw0": {"WAITS": gate, "ROUNDS": "3"},
        "master": {"GEOMX_PARTY": "central"},
        "central1": {"GEOMX_PARTY": "central"},
    }
    cluster.launch(SCRIPT, parties=(1, 1), central_workers=2)
    cluster.finish()
    found = saved(tmp_path)
    assert sorted(found) == [0, 1, 2, 3]
    for rank, rounds in ((0, 5), (1, 3), (2, 5), (3, 5)):
        versions = found[rank]["versions"]
        assert versions.shape == (rounds, 2, 2)
        assert (versions[..., 0] <= versions[..., 1]).all() and (np.diff(versions, axis=0) > 0).all()
        assert (versions[:, 1, 0] == versions[:, 1, 1]).all(), "a single slice is of one version"
    assert np.array_equal(found[2]["t0"][1:], found[3]["t0"][1:]), "central workers have the same results"
    assert found[1]["versions"][0].min() >= 5, "the first party has made four rounds without the second"
    newest = max(found.values(), key=lambda one: one["versions"][-1, 1, 1])
    assert newest["versions"][-1, 1, 1] == 13
    total = 5 * 1 + 3 * 2 + 5 * (3 + 4)
    start = np.random.default_rng(1001).standard_normal(3)
    np.testing.assert_allclose(newest["t1"][-1], start - RATE * total, rtol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "events/root0.jsonl").read_text().splitlines()]
    told = [line["versions"] for line in lines if "versions" in line]
    assert told[-1] == {"A": 5, "B": 3, "central": 5}


def test_a_flat_cluster_with_a_bound(cluster: Cluster, tmp_path: Path) -> None:
    """The second worker begins when the first one's third round is in flight, completes two and leaves."""
    gate = str(tmp_path / "gate")
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "GEOMX_ALGO": "async", "GEOMX_MAX_STALENESS": "2", "OPTIMIZER": SGD,
        "PUSH": "ranks", "SIZES": "10",
    }  # fmt: skip
    ranks = {
        "w0": {"GEOMX_RANK": "0", "OPENS": f"3={gate}", "ROUNDS": "7"},
        "w1": {"GEOMX_RANK": "1", "WAITS": gate, "ROUNDS": "2"},
    }
    cluster.launch_flat(SCRIPT, workers=2, worker_env=ranks)
    cluster.finish()
    found = saved(tmp_path)
    versions = found[0]["versions"][:, 0, 0].tolist()
    assert versions[:2] == [1, 2]
    assert versions[2] >= 4, "the third result has waited for the other's first contribution"
    assert versions[-1] == 9
    start = np.random.default_rng(1000).standard_normal(10)
    np.testing.assert_allclose(found[0]["t0"][-1], start - RATE * (7 * 1 + 2 * 2), rtol=1e-6)


def test_a_pull_is_of_the_newest_value_also_after_a_new_key(cluster: Cluster, tmp_path: Path) -> None:
    cluster.environment = {"OUT": str(tmp_path / "w{rank}.npz"), "GEOMX_ALGO": "mixed"}
    cluster.launch([sys.executable, str(ROOT / "tests/scripts/late_key.py")], parties=(1, 1))
    cluster.finish()
    found = saved(tmp_path)
    assert sorted(found) == [0, 1]
    assert all((one["first"] == -3).all() for one in found.values()), found


def test_without_an_optimizer_everybody_ends_and_is_told_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "GEOMX_ALGO": "mixed", "PUSH": "ranks", "SIZES": "10", "MEET": "1",
    }  # fmt: skip
    cluster.launch(SCRIPT, parties=(1, 1))
    statuses = cluster.wait()
    assert statuses["root0"] == 3
    assert all(statuses[name] for name in statuses if name != "master"), statuses
    assert "error: asynchronous training needs an optimizer" in cluster.output("root0")
    for name in ("root0", "Aw0", "Bw0"):
        assert "set_optimizer" in cluster.output(name), cluster.outputs()
