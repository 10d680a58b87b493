"""Keys to which one worker of each party contributes: shards of a tensor that a party's workers have divided."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from bench import Bench, gradient
from cluster import ROOT, Cluster

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.ps.cluster.members import CENTRAL, ServerMembers
from geomx_cli.ps.net.wire import EVERY, BadMessage, Header, decode_header, encode_header

SIZES = {"all": 70_000, "shard0": 50_000, "shard1": 30_000}


class Parties(Bench):
    """A root with two parties, of ranks 0 and 1, and two central workers, of ranks 2 and 3, with shards 0 and 1."""

    def __init__(self) -> None:
        self.present = [0, 1, 2, 3]
        super().__init__(
            required_contributors=lambda: self.present, shard_of=[EVERY, EVERY, 0, 1].__getitem__, members=4
        )


def test_a_round_has_one_contribution_of_each_party_in_rank_order() -> None:
    bench = Parties()
    for shard, ranks in ((0, (2, 0, 1)), (1, (1, 3, 0))):
        for rank in ranks:
            assert not bench.results()
            bench.push(rank, 1, gradient(rank, 1), shard=shard, key=shard)
        first, second, third = sorted(ranks)
        wanted = gradient(first, 1) + gradient(second, 1) + gradient(third, 1)
        found = bench.results()
        assert sorted(request - 10 for request, _, _ in found) == [first, second, third]
        assert all(np.array_equal(value, wanted) for _, _, value in found)


def test_a_repeat_counts_once_and_gets_the_same_answer() -> None:
    bench = Parties()
    for rank in (0, 0, 2, 1):
        bench.push(rank, 1, gradient(rank, 1), shard=0)
    wanted = gradient(0, 1) + gradient(1, 1) + gradient(2, 1)
    assert all(np.array_equal(value, wanted) for _, _, value in bench.results())
    bench.push(2, 1, gradient(2, 1), shard=0)
    ((request, number, value),) = bench.results()
    assert (request, number) == (12, 1) and np.array_equal(value, wanted)


def test_one_that_leaves_is_waited_for_by_its_own_shard_alone() -> None:
    bench = Parties()
    for shard in (0, 1):
        for rank in (0, 1):
            bench.push(rank, 1, gradient(rank, 1), shard=shard, key=shard)
    bench.present = [0, 1, 2]
    bench.rounds.members_changed()
    found = bench.results()
    assert sorted(request for request, _, _ in found) == [10, 11]
    assert np.array_equal(found[0][2], gradient(0, 1) + gradient(1, 1))
    bench.push(2, 1, gradient(2, 1), shard=0, key=0)
    assert len(bench.results()) == 3


def test_what_another_worker_contributes_is_refused() -> None:
    bench = Parties()
    bench.push(0, 1, gradient(0, 1), shard=0)
    with pytest.raises(BadMessage, match=r"contributions of ranks \(3,\) to a slice of shard 0"):
        bench.push(3, 1, gradient(3, 1), shard=0)
    for shard in (1, EVERY):
        with pytest.raises(BadMessage, match=f"shard {shard} for a slice of shard 0"):
            bench.push(3, 1, gradient(3, 1), shard=shard)
    with pytest.raises(BadMessage, match=r"contributions of ranks \(2, 3\) to a slice of shard 0"):
        bench.push(2, 1, gradient(2, 1), shard=0, contributors=(2, 3))
    for rank in (1, 2):
        bench.push(rank, 1, gradient(rank, 1), shard=0)
    assert len(bench.results()) == 3


def test_a_shard_out_of_bounds_is_refused() -> None:
    assert decode_header(encode_header(Header(shard=CENTRAL - 1)), 0).shard == CENTRAL - 1
    for shard in (EVERY - 1, CENTRAL):
        with pytest.raises(BadMessage, match="malformed header"):
            decode_header(encode_header(Header(shard=shard)), 0)


def test_workers_have_the_shard_of_their_rank_and_parties_all() -> None:
    plane = PlaneSettings(uri="", port=1, servers=1, workers=2)
    root = ServerMembers(NodeSettings(role="global_server", local=plane, upper=plane), is_root=True)
    local = ServerMembers(NodeSettings(role="server", local=plane, upper=plane), is_root=False)
    assert [root.shard_of(rank) for rank in (0, 1, CENTRAL, CENTRAL + 1)] == [EVERY, EVERY, 0, 1]
    assert [local.shard_of(rank) for rank in (0, 1)] == [0, 1]


@pytest.mark.processes
@pytest.mark.parametrize("shape", [{}, {"roots": 2, "local_servers": 2}, {"central_workers": 2}], ids=str)
def test_sums_of_real_parties(cluster: Cluster, tmp_path: Path, shape: dict[str, int]) -> None:
    """Bit for bit, also with several servers, and with central workers, which are members of the roots themselves."""
    script = [sys.executable, str(ROOT / "tests/scripts/shards.py")]
    env = {"OUT": str(tmp_path / "w{rank}.npz"), "GEOMX_RANK_SCOPE": "global"}
    cluster.launch(script, central="central_workers" in shape, env=env, **shape)  # type: ignore[arg-type]
    cluster.finish()
    parties = [(0, 1), (2, 3), (4, 5)][: 3 if "central_workers" in shape else 2]
    for party in parties:
        for own, rank in enumerate(party):
            found = dict(np.load(tmp_path / f"w{rank}.npz"))
            assert len(found) == 8
            for label, value in found.items():
                name, number = label.split("/")
                sums = [
                    [_given(each, int(number), name) for each in (ranks if name == "all" else ranks[own : own + 1])]
                    for ranks in parties
                ]
                if len(parties) == 3:  # central workers contribute to the roots themselves
                    sums[2:] = [[each] for each in sums[2]]
                wanted = _total([_total(part) for part in sums])
                assert value.tobytes() == wanted.tobytes(), (rank, label)
    for name in ("Aw0", "Bw1"):
        said = cluster.output(name)
        assert "refused: key 'far' is contributed by worker 2 of each party, and this one has 2" in said, said
        assert "refused: key 'shard0' has 50000 elements of float32 in rows of 1, contributed by worker 1" in said, said
        assert re.search(r"refused: key 'shard([01])' is contributed by worker \1 of each party\n", said), said


def _given(rank: int, number: int, name: str) -> np.ndarray:
    seed = [rank, number, list(SIZES).index(name)]
    return np.random.default_rng(seed).standard_normal(SIZES[name]).astype(np.float32)


def _total(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
