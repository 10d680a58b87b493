"""TSEngine: what is measured, the choice, and sums that are right whatever happens to a relay."""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from cluster import ROOT, Cluster, until
from in_flight import SCRIPT as IN_FLIGHT
from in_flight import check_results, check_rounds
from in_flight import expected as expected_in_flight
from rounds import SCRIPT, assert_equal, expected, found_in, run

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value, defaults
from geomx_cli.inventory import WanLink
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine
from geomx_cli.ps.cluster.bodies import checked_request
from geomx_cli.ps.delivery._tsengine_rates import AGE, DIRECT, Meter, choose
from geomx_cli.ps.net.security import Identity
from geomx_cli.ps.net.wire import BadMessage
from geomx_cli.runtime.settings import Settings

PLUGINS = ROOT / "tests" / "plugins"
BY_HAND = {"GEOMX_DELIVERY": "forced", "PYTHONPATH": f"{ROOT}{os.pathsep}{PLUGINS}"}
MB = 1_000_000


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plug-in is on this process's path too, as if installed by pip."""

    def forget() -> None:
        plugins._all.cache_clear()
        plugins.table.cache_clear()

    monkeypatch.syspath_prepend(PLUGINS)
    forget()
    yield
    monkeypatch.undo()
    forget()


# The choice.


@pytest.mark.parametrize(
    ("known", "unknown", "most", "greed"),
    [(0, 3, 0.9, 0.0), (1, 3, 0.9, 0.25), (3, 1, 0.9, 0.75), (19, 1, 0.9, 0.9), (19, 1, 1.0, 0.95), (3, 1, 0.5, 0.5)],
)
def test_how_often_the_fastest_known_way_is_chosen(known: int, unknown: int, most: float, greed: float) -> None:
    """min(known / (known + unknown), MAX_GREED_RATE_TS), not rounded; otherwise any of the unknown ways."""
    costs = {way: float(way + 1) if way < known else None for way in range(known + unknown)}
    draw, count = random.Random(7), 4000
    chosen = Counter(choose(costs, most, draw) for _ in range(count))
    assert chosen[0] / count == pytest.approx(greed if known else 1 / unknown, abs=0.03)
    assert set(range(known, known + unknown)) <= chosen.keys()
    assert not any(chosen[way] for way in range(1, known))


def test_a_relay_has_to_be_clearly_faster_than_the_direct_way() -> None:
    draw = random.Random(1)
    assert choose({DIRECT: 1.0, 3: 0.5, 4: 0.4}, 0.9, draw) == 4
    assert choose({DIRECT: 1.0, 3: 0.9}, 0.9, draw) == DIRECT
    assert choose({DIRECT: 1.0}, 0.0, draw) == DIRECT


# Rates.


def test_a_rate_is_that_of_a_busy_link() -> None:
    """1 MB/s; then a pause of 100 s, which says nothing about the link; then half of it."""
    meter = Meter()
    meter.sent(MB, 0.0)
    for step in range(1, 11):
        meter.received(step * MB // 10, step / 10, 1)
    assert meter.rate == pytest.approx(MB, rel=0.01) and not meter.backlog
    meter.sent(2 * MB, 100.0)
    for step in range(1, 11):
        meter.received(MB + step * MB // 10, 100 + step / 5, 2)
    assert meter.rate == pytest.approx(MB / 2, rel=0.05)


def test_what_waits_at_the_sender_is_not_a_slow_link() -> None:
    """Messages of 100 kB, one every second, each there within 10 ms."""
    meter = Meter()
    for second in range(10):
        meter.sent((second + 1) * MB // 10, float(second))
        meter.received((second + 1) * MB // 10, second + 0.01 + 0.001 * second, second)
    assert meter.rate > 5 * MB


def test_small_messages_measure_nothing() -> None:
    meter = Meter()
    for second in range(100):
        meter.sent(1000 * (second + 1), float(second))
        meter.received(1000 * (second + 1), second + 0.5, second)
    assert meter.rate == 0 and meter.is_stale(1)


def test_a_rate_ages() -> None:
    meter = Meter()
    meter.sent(MB, 0.0)
    meter.received(MB, 1.0, 10)
    assert not meter.is_stale(10 + AGE) and meter.is_stale(11 + AGE)
    before = meter.rate
    meter.sent(2 * MB, 5.0)
    meter.received(2 * MB, 5.5, 11 + AGE)
    assert meter.rate >= 2 * before  # an old rate has no weight


def test_a_report_of_more_than_was_sent_changes_nothing() -> None:
    meter = Meter()
    meter.sent(1000, 0.0)
    meter.received(2**53, 1.0, 1)
    assert meter.backlog == 0 and meter.rate == 0


@pytest.mark.parametrize(
    "body",
    [
        {"received": -1}, {"rate": float("inf")}, {"rate": -1.0}, {"servers": [[1.0, 1e300]]}, {"servers": [[1.0]]},
        {"servers": [[1.0, 1.0]] * 5000}, {"expect": [[1]]}, {"skip": [[1, 2]]},
        {"skip": [[1, 2, -3]]}, {"refused": ["x"]}, {"left": 3},
    ],
)  # fmt: skip
def test_a_report_is_bounded(body: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        checked_request("overlay", body)


# The plan.


def of_parties(parties: int, tmp_path: Path, **options: Value) -> Plan:
    values = {**defaults(plugins.table()), "parties": parties, "tsengine": "inter", **options}
    inventory = this_machine(values, range(20_000, 20_000 + ports_needed(values)), one_host=False)
    return plan(inventory, JobSpec(job="relays", options=values, job_dir=str(tmp_path), socket_dir="/tmp/gx-relays"))


def test_local_servers_dial_each_other(tmp_path: Path) -> None:
    found = of_parties(3, tmp_path, local_servers=2)
    between = {pair for pair in found.links if all("/server:" in name for name in pair)}
    wanted = {(f"{a}/server:{n}", f"{b}/server:{n}") for a, b in ("BA", "CA", "CB") for n in (0, 1)}
    assert between == wanted
    assert found.callers["A/server:1"]["C/server:1"] == Identity("C/server:1", "party", 2)
    assert found.process("A/server:0").env["GEOMX_TSENGINE"] == "inter"
    assert any(end.protocol == "tcp" for end in found.process("B/server:0").endpoints)
    direct = of_parties(3, tmp_path, tsengine="")
    assert not any("/server:" in a and "/server:" in b for a, b in direct.links)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"topology": "flat"}, "no local servers"), ({"compress": "fp16"}, "cannot be added to others"),
        ({"algo": "mixed"}, "by themselves"), ({"delivery": "dgt"}, "chooses the delivery tsengine"),
        ({"tsengine": "", "delivery": "tsengine"}, "write --tsengine inter"),
    ],
)  # fmt: skip
def test_what_it_cannot_work_with_is_refused(tmp_path: Path, options: Mapping[str, Value], why: str) -> None:
    with pytest.raises(InvalidSettings, match=why):
        of_parties(2, tmp_path, **options)


def test_the_variable_of_geomx() -> None:
    env = {"DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_SERVER": "1",
           "DMLC_NUM_WORKER": "1", "ENABLE_INTER_TS": "1", "MAX_GREED_RATE_TS": "0.8"}  # fmt: skip
    options = Settings.from_environment(plugins.table(), env).options
    assert plugins.delivery(options) == "tsengine" and options["ts_greed"] == 0.8


# Clusters of real processes.


def launch_planned(cluster: Cluster, parties: int, through: str, rounds: int, **env: str) -> None:
    """A planned job in which the parties of `through` send through others."""
    values: dict[str, Value] = {
        "delivery": "forced", "parties": parties, "slice_elements": 20_000, "heartbeat": 0.2, "rank_scope": "global",
    }  # fmt: skip
    found = cluster.planned(SCRIPT[1:], values, env={"PYTHONPATH": str(PLUGINS), "THROUGH": through})
    cluster.environment = {
        "OUT": str(cluster.directory / "w{rank}.npz"), "ROUNDS": str(rounds), "SERVER_OPTIMIZER": "1", **env,
    }  # fmt: skip
    cluster.launch_planned(found)


def relayed(cluster: Cluster, process: str, what: str) -> int:
    """What this process has counted so far."""
    path = cluster.directory / "events" / f"{process}.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return max((event.get("relayed", {}).get(what, 0) for event in events if event["event"] == "telemetry"), default=0)


@pytest.mark.processes
@pytest.mark.parametrize("through", ["1:0", "0:1"])
def test_the_same_bits_as_with_direct_delivery(
    cluster: Cluster, tmp_path: Path, installed: None, through: str
) -> None:
    """The sum of two parties does not depend on the order."""
    launch_planned(cluster, 2, through, 10, SHUFFLE="1")
    cluster.finish()
    assert_equal(found_in(tmp_path), expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 10), optimizer=True))
    sender, relay = ("B", "A") if through == "1:0" else ("A", "B")
    assert relayed(cluster, f"{sender}-server-0", "sent") > 0 and relayed(cluster, f"{relay}-server-0", "received") > 0


@pytest.mark.processes
def test_six_parties_with_62_keys_in_flight(cluster: Cluster, tmp_path: Path, installed: None) -> None:
    """Two relays with two parties each; the order of the sums differs, so the last bits may."""
    sizes = [500 + 10 * index for index in range(62)]
    launch_planned(cluster, 6, "1:0 2:0 4:3 5:3", 8, SIZES=",".join(map(str, sizes)), SHUFFLE="2")
    cluster.finish()
    parties = [[2 * index, 2 * index + 1] for index in range(6)]
    wanted = expected(parties, dict.fromkeys(range(12), 8), optimizer=True, sizes=sizes)
    found = found_in(tmp_path)
    assert sorted(found) == list(range(12))
    for arrays in found.values():
        for got, want in zip(arrays, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    assert relayed(cluster, "A-server-0", "received") > 0 and relayed(cluster, "D-server-0", "received") > 0


@pytest.mark.processes
@pytest.mark.parametrize("through", ["1:0", "0:1"])
def test_a_stopped_relay_is_gone_around_and_nothing_counts_twice(
    cluster: Cluster, tmp_path: Path, installed: None, through: str
) -> None:
    """It stops with contributions that it has not passed on, and passes them on later: with 0:1 the root has added that
    of the sender by then, with 1:0 it waits there. The sender stops using a relay that it has not heard for a moment,
    so on a busy machine it may take several tries until something is on its way through the stopped one.
    """
    sender, relay = ("B", "A") if through == "1:0" else ("A", "B")
    names = [f"{party}-worker-{rank}" for party in "AB" for rank in (0, 1)]
    gates, parts = tmp_path / "gates", 12
    gates.mkdir()
    launch_planned(cluster, 2, through, 3 * parts, SEGMENT="3", GATES=str(gates))
    for name in ("declare", "leave", "barrier", "close"):
        (gates / name).touch()

    def passed(part: int) -> None:
        (gates / f"part{part}").touch()
        until(lambda: all(f"part{part + 1}\n" in cluster.output(name) for name in names))

    part = 0
    passed(part)
    stopped = cluster.processes[f"{relay}-server-0"].pid
    while not relayed(cluster, f"{sender}-server-0", "rerouted"):
        part += 1
        assert part < parts - 1, "nothing was on its way through the stopped relay"
        os.kill(stopped, signal.SIGSTOP)
        try:
            (gates / f"part{part}").touch()
            time.sleep(2)
        finally:
            os.kill(stopped, signal.SIGCONT)
        passed(part)
    for rest in range(part + 1, parts):
        (gates / f"part{rest}").touch()
    cluster.finish()
    assert relayed(cluster, f"{sender}-server-0", "sent") > 0
    assert_equal(found_in(tmp_path), expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 3 * parts), optimizer=True))


@pytest.mark.processes
@pytest.mark.parametrize(("cut", "roots"), [("below", 1), ("above", 3), ("both", 1)])
@pytest.mark.parametrize("through", ["1:0", "0:1"])
def test_every_round_is_right_though_links_are_cut(
    cluster: Cluster, tmp_path: Path, cut: str, roots: int, through: str
) -> None:
    """Those between local servers too ("below"): contributions and results on their way are lost."""
    check_rounds(cluster, tmp_path, roots, cut, True, 0, **BY_HAND, THROUGH=through)


@pytest.mark.processes
def test_rows_are_sent_directly(cluster: Cluster, tmp_path: Path) -> None:
    check_rounds(cluster, tmp_path, 1, "both", True, 5, **BY_HAND, THROUGH="1:0")


@pytest.mark.processes
def test_no_order_of_pushes_blocks(cluster: Cluster, tmp_path: Path) -> None:
    sizes, rounds = (3_000, 2_000, 3_000, 5_000), 20
    cluster.environment = {
        **BY_HAND, "THROUGH": "1:0", "OUT": str(tmp_path / "w{rank}.npz"), "SIZES": ",".join(map(str, sizes)),
        "ROUNDS": str(rounds), "AHEAD": str(rounds), "BY_KEY": "1", "SERVER_OPTIMIZER": "1", "GEOMX_WINDOW": "8192",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024",
    }  # fmt: skip
    cluster.launch(IN_FLIGHT, roots=3)
    cluster.finish(50)
    check_results(tmp_path, expected_in_flight(True, sizes, rounds))


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_precisions(cluster: Cluster, tmp_path: Path, dtype: str) -> None:
    found = run(cluster, tmp_path, {**BY_HAND, "THROUGH": "1:0", "DTYPE": dtype, "ROUNDS": "8"})
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 8), optimizer=True, dtype=dtype))


@pytest.mark.processes
@pytest.mark.parametrize("rounds", ["3,3,9,9", "9,9,3,3"])
def test_either_party_may_leave_before_the_other(cluster: Cluster, tmp_path: Path, rounds: str) -> None:
    """The relay, or a party that it expects contributions of."""
    names = ("Aw0", "Aw1", "Bw0", "Bw1")
    cluster.each = {name: {"ROUNDS": count} for name, count in zip(names, rounds.split(","), strict=True)}
    found = run(cluster, tmp_path, {**BY_HAND, "THROUGH": "1:0"})
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.processes
def test_the_party_behind_a_slow_link_finds_a_relay_itself(cluster: Cluster, tmp_path: Path) -> None:
    """The root gets most of its bytes through another party, and the sums are the same."""
    slow, names = {"A", "central"}, ("A", "B", "C", "central")
    links = tuple(
        WanLink(source=one, target=other, rate=20e6 if {one, other} == slow else 400e6, delay=0.002)
        for one in names for other in names if one != other
    )  # fmt: skip
    values: dict[str, Value] = {
        "parties": 3, "workers": 1, "rank_scope": "global", "tsengine": "inter", "heartbeat": 0.2,
    }  # fmt: skip
    sizes, rounds = (100_000, 100_000, 100_000, 100_000), 15
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "ROUNDS": str(rounds), "SERVER_OPTIMIZER": "1",
        "SIZES": ",".join(map(str, sizes)),
    }  # fmt: skip
    cluster.launch_planned(cluster.planned(SCRIPT[1:], values, changes={"links": links}))
    cluster.finish()
    wanted = expected([[0], [1], [2]], dict.fromkeys(range(3), rounds), optimizer=True, sizes=sizes)
    for arrays in found_in(tmp_path).values():
        for got, want in zip(arrays, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    whole = 4 * sum(sizes) * rounds
    assert relayed(cluster, "A-server-0", "sent") > whole / 3
