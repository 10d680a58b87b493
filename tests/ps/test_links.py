"""Links that are cut, forget flows, slow down or lose packets, and stopped processes: none of them ends a job.

Three sites in network namespaces, started by hand with the options' defaults. FSA and HFA end bit-identical to numpy.
Needs root.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from averages import SCRIPT as AVERAGES_SCRIPT
from averages import expected as expected_of_hfa
from averages import found_in as history_in
from cluster import RUNTIME, Cluster, free_ports, until
from networks import SWITCH, Network
from rounds import SCRIPT as ROUNDS_SCRIPT
from rounds import assert_equal, expected, found_in

from benchmarks.netns import call

WORKERS = ("Aw0", "Bw0")
SEGMENT = 3
SIZES = (300_000, 10)
TURNS_UP = 60.0
"""Seconds for a part of the training that nothing disturbs, on a busy machine."""

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class Sites(Cluster):
    """The global plane is in site C; parties A and B, with a local server and a worker each, have their own sites.

    The workers wait before each part of SEGMENT rounds until `go` lets them begin it.
    """

    def begin(self, algorithm: str, parts: int) -> None:
        """Start everything."""
        self.algorithm, self.parts = algorithm, parts
        self.network = Network("ABC")
        (self.directory / "gates").mkdir()
        self.environment = {
            "OUT": str(self.directory / "w{rank}.npz"), "ROUNDS": str(SEGMENT * parts), "SEGMENT": str(SEGMENT),
            "GATES": str(self.directory / "gates"), "SIZES": ",".join(map(str, SIZES)), "SERVER_OPTIMIZER": "1",
            "GEOMX_ALGO": algorithm, "PUSH": "weights", "MXNET_KVSTORE_HFA_K2": "2", "GEOMX_INSECURE": "1",
        }  # fmt: skip
        script = AVERAGES_SCRIPT if algorithm == "hfa" else ROUNDS_SCRIPT
        self.open("declare", "barrier", "leave", "close")
        ports = dict(zip("GCAB", free_ports(4), strict=True))
        upper = self._at("GLOBAL_", "C", ports["G"], 2)
        central, roles = self._at("", "C", ports["C"], 1), {"DMLC_ROLE_GLOBAL": "global_server", "DMLC_ROLE": "server"}
        self.start("Cgs", RUNTIME, {**upper, "DMLC_ROLE_GLOBAL": "global_scheduler"})
        self.start("Cs", RUNTIME, {**central, "DMLC_ROLE": "scheduler"})
        self.start("Croot", RUNTIME, {**upper, **central, **roles})
        self.start("Cmaster", script, {**central, "DMLC_ROLE": "worker", "DMLC_ROLE_MASTER_WORKER": "1"})
        for index, site in enumerate("AB"):
            local = self._at("", site, ports[site], 1)
            self.start(f"{site}s", RUNTIME, {**local, "DMLC_ROLE": "scheduler"})
            index_of_party = {"GEOMX_PARTY_INDEX": str(index)}
            self.start(f"{site}srv0", RUNTIME, {**upper, **local, **index_of_party, "DMLC_ROLE": "server"})
            self.start(f"{site}w0", script, {**local, "DMLC_ROLE": "worker"})

    def _at(self, infix: str, site: str, port: int, workers: int) -> dict[str, str]:
        self.uri = self.network.address(site)
        return self._plane(infix, port, 1, workers)

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], namespace: str = "") -> None:
        """Start the process in the site that its name begins with."""
        own = {"GEOMX_PROCESS": name, "DMLC_NODE_HOST": self.network.address(name[0])}
        super().start(name, argv, {**own, **env}, namespace or self.network.spaces.name(name[0]))

    def stop(self) -> None:
        """Kill the remaining processes, and remove the sites."""
        super().stop()
        if hasattr(self, "network"):
            self.network.close()

    def open(self, *gates: str) -> None:
        """Let the workers pass."""
        for gate in gates:
            (self.directory / "gates" / gate).touch()

    def until(self, condition: Callable[[], object], limit: float = TURNS_UP) -> None:
        """Wait for `condition`, while no process fails."""

        def check() -> object:
            assert all(p.poll() in (None, 0) for p in self.processes.values()), self.outputs()
            return condition()

        until(check, limit, self.outputs)

    def meet(self, part: int, limit: float = TURNS_UP) -> None:
        """Wait until all workers have reached this part."""
        self.until(lambda: all(f"at part{part}\n" in self.output(name) for name in WORKERS), limit)

    def says(self, name: str, pattern: str) -> None:
        """Wait until this process has printed the pattern."""
        self.until(lambda: re.search(pattern, self.output(name)))

    def replaced(self, flows: set[str]) -> None:
        """Wait until there are as many new flows."""
        self.until(lambda: len(self.flows() - flows) >= len(flows))

    def go(self, part: int) -> None:
        """Begin this part."""
        self.open(f"part{part}")

    def told(self) -> str:
        """The output of all processes."""
        return "".join(self.output(name) for name in self.processes)

    def assert_trained(self) -> None:
        """All processes succeeded, with bit-identical results and no peer blamed."""
        self.finish(TURNS_UP)
        rounds = SEGMENT * self.parts
        each = {0: rounds, 1: rounds}
        if self.algorithm == "hfa":
            for index, size in enumerate(SIZES):
                wanted = expected_of_hfa([[0], [1]], each, 2, index=index, size=size)
                for rank, history in history_in(self.directory, f"t{index}").items():
                    np.testing.assert_array_equal(history[-1].view("u4"), wanted[rank][-1].view("u4"))
        found = found_in(self.directory)
        assert sorted(found) == [0, 1]
        if self.algorithm == "fsa":
            assert_equal(found, expected([[0], [1]], each, optimizer=True, sizes=SIZES))
        assert all(np.isfinite(array).all() for arrays in found.values() for array in arrays)
        assert "error" not in self.told() and "has not contributed" not in self.told(), self.outputs()

    # What happens to links.

    @contextmanager
    def dropping(self, *rules: str) -> Iterator[None]:
        """Drop packets that come "input" to site B, or leave "output" from it, if they match: each rule is that word
        and a match of nft(8). Packets that B's own kernel would refuse to send are not lost in transit.
        """
        chains = {
            "input": ("B", "inet", "hook input priority 0"),
            "output": (SWITCH, "netdev", "hook ingress device port1 priority 0"),
        }
        with ExitStack() as rules_in_force:
            for number, rule in enumerate(rules):
                direction, _, match = rule.partition(" ")
                site, family, hook = chains[direction]
                nft = self.network.spaces.command(site, ["nft", "-f", "-"])
                table = f"{family} faults{number}"
                device = "iifname net0" if family == "inet" else ""
                lines = [
                    f"add table {table}", f"add chain {table} dropping {{ type filter {hook}; }}",
                    f"add rule {table} dropping {device} {match} drop",
                ]  # fmt: skip
                call(nft, lines=[*lines, ""])
                rules_in_force.callback(call, nft, lines=[f"delete table {table}", ""])
            yield

    def shape(self, rate: str) -> None:
        """Limit the rate into and out of site B. The queues hold 0.1 s at 100 mbit."""
        bucket = ["root", "tbf", "rate", rate, "burst", "32kb", "limit", "1250000"]
        for site, device in (("B", "net0"), (SWITCH, "port1")):
            call(self.network.spaces.command(site, ["tc", "qdisc", "replace", "dev", device, *bucket]))

    def queued(self) -> int:
        """Bytes queued to leave site B."""
        listing = call(self.network.spaces.command("B", ["tc", "-s", "qdisc", "show", "dev", "net0"]))
        found = re.search(r"backlog (\d+)b", listing)
        return int(found[1]) if found else 0

    def flows(self) -> set[str]:
        """The local ports of connections dialled by site B."""
        listing = call(self.network.spaces.command("B", ["ss", "-tnH", "state", "established"]))
        there = self.network.address("C")
        return {line.split()[2].rpartition(":")[2] for line in listing.splitlines() if there in line.split()[3]}

    @contextmanager
    def forgetting(self, *hooks: str) -> Iterator[set[str]]:
        """Silently drop the packets of the connections that exist now, and only of those."""
        flows = self.flows()
        ports = f"{{ {', '.join(sorted(flows))} }}"
        rules = [f"{hook} tcp {'d' if hook == 'input' else 's'}port {ports}" for hook in hooks]
        with self.dropping(*rules):
            yield flows


Begin = Callable[..., list[Sites]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts one job of `parts` per algorithm, all with the same faults at once; removed at the end."""
    with ExitStack() as made:

        def start(parts: int, *algorithms: str) -> list[Sites]:
            jobs = []
            for algorithm in algorithms:
                (tmp_path / algorithm).mkdir()
                jobs.append(Sites(tmp_path / algorithm))
                made.callback(jobs[-1].stop)
                jobs[-1].begin(algorithm, parts)
            return jobs

        yield start


def finish(jobs: Sequence[Sites], part: int) -> None:
    """Run the last part, and check all results."""
    for sites in jobs:
        sites.meet(part)
        sites.go(part)
    for sites in jobs:
        sites.assert_trained()


@pytest.mark.timeout(240)
def test_flows_that_are_forgotten_are_replaced(begin: Begin) -> None:
    """In one direction, the other and both; while rounds are in flight, and while idle."""
    kinds = (("input",), ("output",), ("input", "output"))
    jobs = begin(len(kinds) + 1, "fsa", "mixed")
    for part, hooks in enumerate(kinds):
        with ExitStack() as rules:
            forgotten = []
            for sites in jobs:
                sites.meet(part)
                forgotten.append(rules.enter_context(sites.forgetting(*hooks)))
                assert len(forgotten[-1]) >= 4
                if part != 1:
                    sites.go(part)
            began = time.monotonic()
            for sites, flows in zip(jobs, forgotten, strict=True):
                sites.replaced(flows)
                print(f"{sites.algorithm} {hooks}: {len(flows)} flows replaced within {time.monotonic() - began:.1f} s")
                sites.go(part)
    finish(jobs, len(kinds))
    for sites in jobs:
        assert re.search(r"the connection to Croot was cut, and is back", sites.output("Bsrv0"))


@pytest.mark.timeout(300)
def test_a_link_that_is_slow_or_loses_packets_only_takes_longer(begin: Begin) -> None:
    """First at a fiftieth of its rate, with a queue sized for the full rate, then with 1 % of loss."""
    jobs = begin(3, "fsa", "hfa")
    for sites in jobs:
        sites.meet(0)
        sites.shape("100mbit")
    for sites in jobs:
        sites.go(0)
        # On a loaded machine the part may be over before a queue is observed: then nothing is left to slow down.
        sites.until(lambda sites=sites: sites.queued() > 0 or "at part1" in sites.output("Bw0"))
        sites.shape("2mbit")
    slow = []
    for sites in jobs:
        sites.meet(1, limit=150)
        slow.append(sites.told().count("was cut, and is back"))
        sites.shape("100mbit")
    with ExitStack() as losses:
        for sites in jobs:
            lost = [f"{hook} numgen random mod 100 < 1" for hook in ("input", "output")]
            losses.enter_context(sites.dropping(*lost))
            sites.go(1)
        for sites, before in zip(jobs, slow, strict=True):
            sites.meet(2)
            after = sites.told().count("was cut, and is back") - before
            print(f"{sites.algorithm}: {before} reconnects while slow, {after} with loss")
    finish(jobs, 2)


def test_a_link_that_drops_large_packets_is_named(begin: Begin) -> None:
    """Heartbeats pass, and new connections are made, but no tensor arrives; then it is repaired."""
    (sites,) = begin(3, "fsa")
    sites.meet(0)
    sites.go(0)
    sites.meet(1)
    with sites.dropping("output meta length > 1200"):
        sites.go(1)
        sites.says("Bsrv0", r"the link Bsrv0 - Croot passes small messages but drops large ones: .* \(path MTU\)")
    finish([sites], 2)


@pytest.mark.timeout(300)
def test_links_that_are_cut_come_back(begin: Begin) -> None:
    """While rounds are in flight, each time; a longer cut, of several attempts to connect, is reported at both ends, by
    the name of the link.
    """
    lengths = (3, 20)
    jobs = begin(len(lengths) + 1, "fsa", "hfa", "mixed")
    for part, seconds in enumerate(lengths):
        for sites in jobs:
            sites.meet(part)
        with ExitStack() as cuts:
            for sites in jobs:
                sites.go(part)
                cuts.enter_context(sites.dropping("input", "output"))
            time.sleep(seconds)
        began = time.monotonic()
        for sites in jobs:
            sites.meet(part + 1)
            took = time.monotonic() - began
            print(f"{sites.algorithm}: the rounds of a cut of {seconds} s were done within {took:.1f} s after it")
    for sites in jobs:
        for here, there in (("Bsrv0", "Croot"), ("Croot", "Bsrv0"), ("Cgs", "Bsrv0"), ("Bsrv0", "Cgs")):
            assert f"no heartbeat from {there} on link {here} - {there} since " in sites.output(here)
            sites.says(here, rf"{there} is back on link {here} - {there}, after \d+ s")
    finish(jobs, len(lengths))


@pytest.mark.timeout(240)
def test_processes_that_are_stopped_go_on(begin: Begin) -> None:
    """A worker, a local server and the root, each for 15 s that overlap, while rounds are in flight."""
    stopped = ("Aw0", "Bsrv0", "Croot")
    jobs = begin(2, "hfa", "mixed")
    for sites in jobs:
        sites.meet(0)
        sites.go(0)
    for action, pause in ((signal.SIGSTOP, 15 - 3 * len(stopped)), (signal.SIGCONT, 0)):
        for name in stopped:
            for sites in jobs:
                os.kill(sites.processes[name].pid, action)
            time.sleep(3)
        time.sleep(pause)
    finish(jobs, 1)
    for sites in jobs:
        for here, there in (("Asrv0", "Aw0"), ("As", "Aw0"), ("Bs", "Bsrv0"), ("Asrv0", "Croot"), ("Cgs", "Croot")):
            assert f"no heartbeat from {there} on link {here} - {there} since " in sites.output(here)
        assert "no heartbeat from Bw0" not in sites.told(), "who was stopped blames nobody that was not"
