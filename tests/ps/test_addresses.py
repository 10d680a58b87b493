"""Clusters started by hand whose schedulers have names or IPv6 addresses, and the errors if that is impossible."""

import re
import socket
from pathlib import Path

import pytest
from cluster import RUNTIME, Cluster, free_ports
from rounds import assert_equal, expected, run

from geomx_cli.contract import addresses
from geomx_cli.contract.config import PlaneSettings
from geomx_cli.core.errors import InvalidSettings

ELSEWHERE = "203.0.113.7"
ROLES = {
    "scheduler": {"DMLC_ROLE": "scheduler"},
    "server": {"DMLC_ROLE": "server"},
    "worker": {"DMLC_ROLE": "worker"},
}


@pytest.mark.parametrize("uri", ["::1", "[::1]", "localhost", socket.gethostname()])
def test_schedulers_by_name_or_ipv6_address(cluster: Cluster, tmp_path: Path, uri: str) -> None:
    cluster.uri = uri
    # A machine's name may resolve to an address that other machines can reach.
    found = run(cluster, tmp_path, {"GEOMX_INSECURE": "1" if uri == socket.gethostname() else ""})
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))
    says = cluster.output("Asrv0")
    assert "[::1]" in says if "::1" in uri else "listening on tcp://" in says


@pytest.mark.parametrize(
    ("role", "variables", "says"),
    [
        ("scheduler", {"DMLC_PS_ROOT_URI": "no such host"}, "cannot find the address of 'no such host': name or"),
        ("scheduler", {"DMLC_PS_ROOT_URI": "a..b"}, "cannot find the address of 'a..b'"),
        ("scheduler", {"DMLC_PS_ROOT_URI": ELSEWHERE}, f"{ELSEWHERE} is no address of this machine start this process"),
        ("server", {"DMLC_PS_ROOT_URI": "no such host"}, "cannot find the address of 'no such host'"),
        ("server", {"DMLC_PS_ROOT_URI": "255.255.255.255"}, "this machine has no route to 255.255.255.255"),
        ("server", {"DMLC_NODE_HOST": ELSEWHERE}, f"{ELSEWHERE} is no address of this machine"),
        ("server", {"DMLC_INTERFACE": "none0"}, "DMLC_INTERFACE=none0: no such interface"),
        ("worker", {"DMLC_INTERFACE": "none0"}, "DMLC_INTERFACE=none0: no such interface"),
        ("scheduler", {"DMLC_INTERFACE": "none0"}, "DMLC_INTERFACE=none0: no such interface"),
        ("worker", {"DMLC_PS_ROOT_URI": "no such host"}, "cannot find the address of 'no such host'"),
    ],
)
def test_an_address_that_cannot_be_used_is_told(
    cluster: Cluster, role: str, variables: dict[str, str], says: str
) -> None:
    plane = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_ports(1)[0])}
    counts = {"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1"}
    cluster.start("it", RUNTIME, {**ROLES[role], **plane, **counts, **variables})
    assert cluster.wait() == {"it": 3}
    output = re.sub(r"\s+", " ", cluster.output("it"))
    assert output.startswith("error: ")
    assert says in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("endpoint", "loopback"),
    [
        ("ipc:///tmp/s", True), ("tcp://127.0.0.1:9000", True), ("tcp://127.8.8.8:*", True), ("tcp://[::1]:9000", True),
        ("tcp://127.example.org:9000", False), ("tcp://*:9000", False), ("tcp://0.0.0.0:9000", False),
        ("tcp://[::]:9000", False), ("tcp://192.168.0.1:*", False), ("tcp://eth0:9000", False),
    ],
)  # fmt: skip
def test_loopback_is_what_the_address_says(endpoint: str, loopback: bool) -> None:
    assert addresses.is_private(endpoint) == loopback


def test_an_address_resolves_to_itself() -> None:
    for address in ("127.0.0.1", "::1", ELSEWHERE, "2001:db8::1"):
        assert addresses.resolve(address) == [address]
    assert addresses.own("127.0.0.1") == ["127.0.0.1"]
    assert PlaneSettings("[::1]", 9000, 1, 2).to_dial() == PlaneSettings("::1", 9000, 1, 2).endpoint
    with pytest.raises(InvalidSettings, match=r"^203.0.113.7 is no address of this machine"):
        PlaneSettings(ELSEWHERE, 9000, 1, 2).to_listen()
