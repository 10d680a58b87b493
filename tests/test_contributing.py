"""The examples of CONTRIBUTING.md, installed as plug-ins from the page as it stands, in jobs compared with numpy."""

import ast
import inspect
import json
import os
import stat
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import last_rounds
import numpy as np
import pytest
from bench import KeptLink
from cluster import ROOT, Cluster
from examples import offer, shown
from rounding import rounded
from rounds import assert_equal, expected, run
from tree import Tree

from geomx_cli.core import plugins
from geomx_cli.core.options import Value, defaults
from geomx_cli.hosts.allocation import Waiting
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.inventory import Request
from geomx_cli.plan.this_machine import this_machine
from geomx_cli.ps.aggregation.codec import parse_codec
from geomx_cli.ps.cluster.rpc import Rpc
from geomx_cli.ps.net.wire import BadMessage, Header, Kind
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.frontends import numpy as numpy_front_end

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a plug-in, in this process too; returns PYTHONPATH for others."""
    folder = tmp_path / "site"

    def forget() -> None:
        plugins._all.cache_clear()
        plugins.table.cache_clear()
        parse_codec.cache_clear()

    def installed(group: str, module: str, code: str) -> str:
        offer(folder, module, code, group)
        plugins._may_register.cache_clear()
        forget()
        return f"{ROOT}{os.pathsep}{folder}"

    monkeypatch.syspath_prepend(folder)
    yield installed
    monkeypatch.undo()
    forget()


@pytest.mark.processes
@pytest.mark.parametrize("where", ["server", "worker"])
def test_the_algorithm(cluster: Cluster, install: Install, where: str) -> None:
    """Half of each gradient at twice the rate is SGD, wherever the optimizer runs."""
    (code,) = shown("Add an algorithm")
    path = install("algorithms", "damped", code)
    options: dict[str, Value] = {
        "algo": "damped", "damping": 0.5, "optimizer_on": where, "network": "linear",
        "data": "tiny:data", "split": "dirichlet:0.2", "seed": 15, "batch_size": last_rounds.BATCH,
        "epochs": last_rounds.EPOCHS, "optimizer": "sgd", "lr": 2 * last_rounds.RATE,
        "momentum": last_rounds.MOMENTUM, "save_every": 1, "parties": 2, "workers": 1,
    }  # fmt: skip
    folders = (path, ROOT / "tests/scripts", ROOT / "tests/without_mxnet")
    cluster.environment = {"SAMPLES": "90"}
    cluster.launch_planned(cluster.planned((), options, env={"PYTHONPATH": os.pathsep.join(map(str, folders))}))
    cluster.finish()
    kept, wanted = last_rounds.checkpoints(cluster.directory), last_rounds.fsa(2, 15)
    assert max(kept) == max(wanted) > 5
    for found, right in zip(kept[max(kept)], wanted[max(wanted)], strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
    about = plugins.algorithms()["damped"]
    assert about.sums_gradients, "so scripts, checks and advice take it for what it is"


def test_the_codec(install: Install) -> None:
    (code,) = shown("Add a codec")
    install("codecs", "my_bf16", code)
    codec = parse_codec("my_bf16")
    assert codec is not None
    with pytest.raises(BadMessage, match="5 bytes of bf16 for 3 elements"):
        codec.decode(memoryview(b"12345"), 3)
    assert np.isnan(codec.decode(codec.encode(np.array([np.nan, np.inf], np.float32)), 2)).tolist() == [True, False]
    tree = Tree([2, 2], lambda workers, is_root: FsaServer(), compress="my_bf16")
    tree.init(np.zeros(8, np.float32))
    given = np.random.default_rng(7).standard_normal((2, 2, 8)).astype(np.float32)
    for party in range(2):
        for rank in range(2):
            tree.push((party, rank), 1, given[party, rank])
    sums = [rounded(party[0] + party[1], 8) for party in given]
    assert np.array_equal(tree.last((1, 0)), rounded(sums[0] + sums[1], 8))
    assert tree.crossed[-1] == 2 * 8


RECORDED = """
from pathlib import Path

from counted import Counted, options, refuses

name = "recorded"


class Recorded(Counted):
    def on_request(self, request):
        if request.topic == "counted":
            with (Path(__file__).parent / "counts").open("a") as file:
                print(request.body["contributions"], self._received[request.link], file=file)
        return super().on_request(request)


worker = server = Recorded
"""


@pytest.mark.processes
def test_the_delivery(cluster: Cluster, install: Install, tmp_path: Path) -> None:
    """Its notifications arrive, with what was sent."""
    (code,) = shown("Add a delivery")
    install("deliveries", "counted", code)
    path = install("deliveries", "recorded", RECORDED)
    found = run(cluster, tmp_path, {"PYTHONPATH": path, "GEOMX_DELIVERY": "recorded"})
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))
    slices, rounds = 4 + 1 + 1, 5
    each = slices * rounds
    counts = (tmp_path / "site" / "counts").read_text().splitlines()
    assert sorted(counts) == ["0 0", *[f"{each} {each}"] * 6], "the master, four workers and two local servers"


def test_the_delivery_reports_what_came_twice(install: Install) -> None:
    (code,) = shown("Add a delivery")
    install("deliveries", "counted", code)
    made: Any = plugins.factory(plugins.find("delivery", "counted"), "server")
    written: list[Any] = []
    delivery, rpc, link = made(), Rpc(Mock(), 1.0), KeptLink()
    delivery.begin(SimpleNamespace(rpc=rpc, events=SimpleNamespace(write=written.append)), None, None)
    for _ in range(5):
        assert not delivery.receive(link, Header(kind=Kind.EXCHANGE), None)
    for sent in (5, 3):
        request = rpc.receive(link, 0, 0, "counted", {"contributions": sent, "more": 1})  # type: ignore[arg-type]
        assert request is not None and request.body == {"contributions": sent}
        assert delivery.on_request(request)
    assert [event.message for event in written] == ["2 contributions of the member came twice"]
    with pytest.raises(BadMessage, match=r"got `str` - at `\$.contributions`"):
        rpc.receive(link, 0, 0, "counted", {"contributions": "5"})  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="a request 'counted' without a number"):
        Rpc(Mock(), 1.0).receive(link, 0, 0, "counted", {"contributions": 5})  # type: ignore[arg-type]


GCLOUD = """#!/bin/sh
echo "$*" >> "$0.calls"
case "$3" in list) cat "$0.json";; esac
"""


@pytest.mark.processes
def test_the_allocator(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = shown("Add an allocator")
    install("allocators", "gcloud", code)
    path = tmp_path / "gcloud"
    path.write_text(GCLOUD)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found: Any = plugins.find("allocator", "gcloud")
    hosts = this_machine({**defaults(plugins.table()), "parties": 1}, range(20_000, 20_100)).hosts
    request, login = Request(name="east", allocator="gcloud", arguments=("--zone=us-east1-b",)), LocalConnector("east")
    found.ask(request, hosts, "j1", None, login)
    made = [{"name": name, "networkInterfaces": [{"networkIP": ip}]} for name, ip in (("b", "10.0.0.2"), ("a", "::1"))]
    for last, wanted in ("STAGING", "for 1 of 2 instances to start"), ("RUNNING", ["::1", "10.0.0.2"]):
        (tmp_path / "gcloud.json").write_text(
            json.dumps([{**each, "status": state} for each, state in zip(made, ("RUNNING", last), strict=True)])
        )
        given = found.given(request, hosts, "j1", login)
        assert (given.why if isinstance(given, Waiting) else [host.access.address for host in given]) == wanted
    assert [host.address for host in given] == wanted
    assert not found.release(request, "j1", login)
    calls = (tmp_path / "gcloud.calls").read_text().splitlines()
    create = "create geomx-j1-central geomx-j1-a --async --labels=geomx=j1-east --zone=us-east1-b --quiet"
    assert calls[0] == f"compute instances {create}"
    assert calls[-1] == "compute instances delete a b --quiet"


def test_what_is_shown_of_geomx_is_what_it_has() -> None:
    run_of = textwrap.dedent(inspect.getsource(LocalConnector.run))
    assert statements(shown("Add a connector")[1]) == statements(run_of)
    assert statements(shown("Add a front end")[0]) == statements(inspect.getsource(numpy_front_end))


def statements(source: str) -> list[str]:
    """The functions, without docstrings, and values of a module that others use."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            node.body = [line for line in node.body if not isinstance(line, ast.Expr)]
        if isinstance(node, ast.FunctionDef | ast.Assign):
            found.append(ast.unparse(node))
    return [text for text in found if not text.startswith("__all__")]
