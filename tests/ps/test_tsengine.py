"""TSEngine: what is measured, the choice, and the plan."""

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from geomx_cli.contract.security import Identity
from geomx_cli.contract.settings import Settings
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value, defaults
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.ports import host_errors, ports_needed
from geomx_cli.plan.this_machine import this_machine
from geomx_cli.ps.cluster.bodies import checked_request
from geomx_cli.ps.delivery._tsengine_neighbours import AGE, DIRECT, FEW, LAST, TOPICS, Meter, choose
from geomx_cli.ps.net.wire import BadMessage

MB = 1_000_000


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
    """Messages of 100 kB, one every second, each there within 20 ms."""
    meter = Meter()
    begin(meter)
    for second in range(1, 10):
        meter.sent(meter._sent, float(second))
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
    begin(meter)
    for _ in range(FEW):
        assert meter.is_stale(10)
        pass_megabyte(meter, 1.0, 10)
    assert not meter.is_stale(10 + AGE) and meter.is_stale(11 + AGE)
    pass_megabyte(meter, 0.5, 11 + AGE)
    assert meter.rate == pytest.approx(2 * MB, rel=0.05)  # old samples have no weight
    assert meter.is_stale(11 + AGE)  # one is too few


def begin(meter: Meter) -> None:
    """A small message takes a millisecond."""
    meter.sent(1000, 0.0)
    meter.received(1000, 0.001, 1)


def pass_megabyte(meter: Meter, seconds: float, round_: int) -> None:
    """Send a megabyte on the idle link, of which the receiver reports after so many seconds."""
    now = meter.moved + 10
    meter.sent(meter._sent, now)
    meter.sent(meter._sent + MB, now)
    meter.received(meter._sent, now + seconds, round_)


def test_a_link_that_was_idle_at_times_is_no_slower_for_that() -> None:
    """A megabyte in 2 s, in 0.2 s and many in 2 s, each on an idle link: it carries 5 MB/s, and receivers are busy."""
    meter = Meter()
    begin(meter)
    for seconds in (2.0, 0.2, 2.0, 2.0, 2.0, 2.0):
        pass_megabyte(meter, seconds, 1)
    assert meter.rate == pytest.approx(5 * MB, rel=0.01)


def test_a_link_with_a_backlog_has_the_median_rate_of_its_last_samples() -> None:
    """It carried 5 MB/s. Now 0.1 MB take 0.2 s each while more wait, but for one that takes 0.1 s."""
    meter = Meter()
    begin(meter)
    for _ in range(LAST):
        pass_megabyte(meter, 0.2, 1)
    now, total = meter.moved + 10, meter._sent
    meter.sent(total, now)
    meter.sent(total + 4 * MB, now)
    for step in range(1, 8):
        now += 0.1 if step == 4 else 0.2
        meter.received(total + step * MB // 10, now, 1)
    assert meter.rate == pytest.approx(MB / 2, rel=0.01)


def test_when_bytes_were_sent_is_not_taken_too_late() -> None:
    """A process that looked 0.1 s ago, and sees a megabyte sent and received, knows at least 10 MB/s, not more."""
    meter = Meter()
    begin(meter)
    meter.sent(1000, 9.9)
    meter.sent(1000 + MB, 10.0)
    meter.received(1000 + MB, 10.0, 1)
    assert meter.rate == pytest.approx(10 * MB, rel=0.02)


def test_the_first_message_of_a_link_has_a_rate_too() -> None:
    """However large: nothing small has shown the latency."""
    meter = Meter()
    meter.sent(MB, 10.0)
    meter.received(MB, 10.5, 1)
    assert meter.rate == pytest.approx(2 * MB)


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
        checked_request("overlay", body, TOPICS)


# The plan.


def of_parties(
    parties: int, tmp_path: Path, reachable_from: Mapping[str, tuple[str, ...]] = {}, **options: Value
) -> Plan:
    values = {**defaults(plugins.table()), "parties": parties, "tsengine": "inter", **options}
    inventory = this_machine(values, range(20_000, 20_000 + ports_needed(values)), one_host=False)
    inventory = inventory.with_hosts(
        structs.replace(host, reachable_from=reachable_from.get(host.name)) for host in inventory.hosts
    )
    if errors := host_errors(inventory):
        raise InvalidSettings(f"{errors[0].host}: {errors[0].message}", errors[0].hint)
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


def between(found: Plan, role: str) -> set[tuple[str, str]]:
    """The links between processes of this role."""
    return {pair for pair in found.links if all(f"/{role}:" in name for name in pair)}


def test_workers_of_a_party_dial_each_other(tmp_path: Path) -> None:
    found = of_parties(2, tmp_path, workers=3, tsengine="intra")
    pairs = {(f"{party}/worker:{a}", f"{party}/worker:{b}") for party in "AB" for a, b in ((1, 0), (2, 0), (2, 1))}
    assert between(found, "worker") == pairs and not between(found, "server")
    assert found.callers["A/worker:1"] == {"A/worker:2": Identity("A/worker:2", "worker", 2)}
    both = of_parties(2, tmp_path, workers=3, tsengine="both")
    assert between(both, "worker") == pairs and between(both, "server") == {("B/server:0", "A/server:0")}
    assert not any("GEOMX_PEERS" in process.env for process in both.processes)


def test_hosts_are_linked_only_where_the_inventory_says_that_they_reach_each_other(tmp_path: Path) -> None:
    """B would dial A, which nobody can: A dials B. Of A and C neither reaches the other."""
    found = of_parties(3, tmp_path, {"A": (), "C": ("B", "central")})
    assert between(found, "server") == {("A/server:0", "B/server:0"), ("C/server:0", "B/server:0")}
    peers = {name: found.process(f"{name}/server:0").env.get("GEOMX_PEERS") for name in "ABC"}
    assert peers == {"A": "to:1", "B": "from:0 from:2", "C": "to:1"}
    assert found.callers["B/server:0"]["A/server:0"] == Identity("A/server:0", "party", 0)
    alone = of_parties(2, tmp_path, {"A": (), "B": ()})
    assert not between(alone, "server")
    assert {alone.process(f"{name}/server:0").env["GEOMX_PEERS"] for name in "AB"} == {"none"}


def test_a_host_that_has_to_be_dialled_must_be_reachable(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="central: central/global_scheduler:0 runs there, and is dialled by A/"):
        of_parties(2, tmp_path, {"central": ("B",)})
    with pytest.raises(InvalidSettings, match="A: A/global_server:0 runs there, and is dialled by B/server:0"):
        of_parties(2, tmp_path, {"A": ()}, topology="spread")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"topology": "flat"}, "no local servers"), ({"delivery": "dgt"}, "chooses the delivery tsengine"),
        ({"tsengine": "", "delivery": "tsengine"}, "write --tsengine inter"),
    ],
)  # fmt: skip
def test_what_it_cannot_work_with_is_refused(tmp_path: Path, options: Mapping[str, Value], why: str) -> None:
    with pytest.raises(InvalidSettings, match=why):
        of_parties(2, tmp_path, **options)


@pytest.mark.parametrize("mode", ["intra", "both"])
def test_workers_that_add_their_gradients_themselves_do_not_relay(tmp_path: Path, mode: str) -> None:
    values = {**defaults(plugins.table()), "parties": 2, "tsengine": mode, "reduce": "torch"}
    inventory = this_machine(values, range(20_000, 20_000 + ports_needed(values)), one_host=False)
    spec = JobSpec(job="relays", options=values, job_dir=str(tmp_path), socket_dir="/tmp/gx-r", script=("train.py",))
    with pytest.raises(InvalidSettings, match="write inter"):
        plan(inventory, spec)


@pytest.mark.parametrize(("inter", "intra", "mode"), [("1", "0", "inter"), ("0", "1", "intra"), ("1", "1", "both")])
def test_the_variables_of_geomx(inter: str, intra: str, mode: str) -> None:
    env = {"DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_SERVER": "1",
           "DMLC_NUM_WORKER": "1", "ENABLE_INTER_TS": inter, "ENABLE_INTRA_TS": intra, "MAX_GREED_RATE_TS": "0.8",
           }  # fmt: skip
    options = Settings.from_environment(plugins.table(), env).options
    assert deliveries.chosen(options) == "tsengine" and options["tsengine"] == mode and options["ts_greed"] == 0.8
