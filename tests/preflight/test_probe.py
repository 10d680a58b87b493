"""The probe that runs on a host, as a process."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import free_ports
from networks import bare_python

import geomx_cli
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.probe import facts as facts_module
from geomx_cli.probe import ports
from geomx_cli.probe.listeners import Listeners
from geomx_cli.probe.service import Service

pytestmark = pytest.mark.processes

FACTS = {
    "state_dir": "~/state",
    "workdir": "/no/such/folder",
    "temp": "/tmp",
    "modules": ["numpy", "no_such_module"],
    "distributions": ["numpy", "no-such-distribution"],
    "binds": ["127.0.0.1", "192.0.2.77"],
    "gpus": True,
}


class Probe:
    """A running probe."""

    def __init__(self, python: str = sys.executable, **env: str) -> None:
        source = str(Path(geomx_cli.__file__).parents[1])
        self.process = subprocess.Popen(
            [python, "-m", "geomx_cli.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={**os.environ, "PYTHONPATH": source, **env},
        )
        self._number = 0

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        self.write(json.dumps({"id": self._number, "do": what, **fields}) + "\n")
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert answer.pop("id") == self._number
        return answer

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def end(self) -> int:
        """Close its standard input; returns the exit status."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(240)
        self.process.stdout.close()
        return status


@pytest.fixture
def start() -> Iterator[Callable[..., Probe]]:
    probes: list[Probe] = []

    def begin(*arguments: str, **env: str) -> Probe:
        probes.append(Probe(*arguments, **env))
        return probes[-1]

    yield begin
    for probe in probes:
        probe.process.kill()
        probe.process.wait()
        for stream in (probe.process.stdin, probe.process.stdout):
            assert stream is not None
            stream.close()


def listening(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_facts(start: Callable[..., Probe], tmp_path: Path) -> None:
    free, taken = free_ports(2)
    with socket.create_server(("127.0.0.1", taken)):
        facts = start(HOME=str(tmp_path)).ask("facts", ports=[free, taken], **FACTS)
    assert facts["version"] == geomx_cli.__version__
    assert facts["executable"] == sys.executable
    assert facts["package"] == str(Path(geomx_cli.__file__).parent)
    assert facts["state"]["path"] == str(tmp_path / "state")
    assert (facts["state"]["exists"], facts["state"]["error"]) == (False, "")
    assert abs(facts["state"]["free"] - psutil.disk_usage(str(tmp_path)).free) < 1e9
    assert not facts["work"]["exists"]
    assert facts["sockets"] == ""
    assert facts["free"] == {"127.0.0.1": [free]}
    assert facts["unusable"] == {"192.0.2.77": "the address is none of this host's"}
    assert list(facts["taken"]) == [str(taken)]
    assert f"(pid {os.getpid()})" in facts["taken"][str(taken)]
    assert facts["missing"] == ["no_such_module"]
    assert list(facts["versions"]) == ["numpy"]
    assert 0 < facts["memory"] <= psutil.virtual_memory().total
    assert 1 <= facts["cores"] <= (os.cpu_count() or 1)
    assert not list(tmp_path.iterdir())


def test_the_version_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the package that PyTorch's build requires, if it is there."""
    packages = {"torch": "2.6.0", "nvidia_nccl_cu12": "2.21.5"}
    for name, version in packages.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        required = 'nvidia-nccl-cu12==2.21.5; platform_system == "Linux"' if name == "torch" else "nothing"
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {required}\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert facts_module._versions(["torch", "numpy"]) == {"torch": "2.6.0", "torch.nccl": "2.21.5"}
    shutil.rmtree(tmp_path / "nvidia_nccl_cu12-2.21.5.dist-info")
    assert facts_module._versions(["torch"]) == {"torch": "2.6.0"}


def test_the_holders_of_many_ports_are_found_at_once() -> None:
    names = free_ports(3)
    with socket.create_server(("127.0.0.1", names[0])), socket.create_server(("127.0.0.1", names[1])):
        found = ports.holders(names)
    assert [f"(pid {os.getpid()})" in found[port] for port in names] == [True, True, False]
    assert found[names[2]] == ""


def test_the_folder_for_sockets_is_the_hosts_own(start: Callable[..., Probe], tmp_path: Path) -> None:
    facts = start(HOME=str(tmp_path), TMPDIR=str(tmp_path)).ask("facts", ports=[], **{**FACTS, "temp": ""})
    assert (facts["temp"], facts["uid"], facts["sockets"]) == (str(tmp_path), os.getuid(), "")


def test_addresses_are_those_that_the_system_has(start: Callable[..., Probe]) -> None:
    told = start().ask("facts", ports=[], **FACTS)["addresses"]
    known = {
        name: {
            entry.address
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
        }
        for name, entries in psutil.net_if_addrs().items()
    }
    assert {name: set(own) for name, own in told.items()} == {name: own for name, own in known.items() if own}


def test_it_needs_nothing_but_python(start: Callable[..., Probe], tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare")
    facts = start(python).ask("facts", ports=[], **FACTS)
    assert facts["executable"] == python
    assert facts["missing"] == ["numpy", "no_such_module"]


def test_folders_that_cannot_be_used(start: Callable[..., Probe], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = {"state_dir": str(tmp_path / "file" / "deeper"), "temp": "/no/such/folder", "workdir": str(tmp_path)}
    facts = start().ask("facts", ports=[], **(FACTS | wrong))
    assert "director" in facts["state"]["error"]
    assert "No such file" in facts["sockets"]
    assert facts["work"] == facts["work"] | {"path": str(tmp_path), "exists": True, "error": ""}


def test_listening_dialling_measuring_and_letting_go(start: Callable[..., Probe]) -> None:
    port, idle, other = free_ports(3)
    listener, dialler = start(), start()
    binds = [["127.0.0.1", port, "tcp"], ["127.0.0.1", other, "tcp"], ["192.0.2.77", idle, "tcp"]]
    with socket.create_server(("127.0.0.1", other)), socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", idle))
        binds += [["127.0.0.1", other, "udp"], ["127.0.0.1", idle, "udp"]]
        good, taken, nowhere, free, busy = listener.ask("listen", token="mine", owner="abc", binds=binds)["results"]
        assert free == good and busy == {"error": "it is in use", "in_use": True, "holder": ""}
        assert good == {"error": "", "in_use": False, "holder": ""}
        assert taken["in_use"]
        assert f"(pid {os.getpid()})" in taken["holder"]
        assert nowhere == {"error": "the address is none of this host's", "in_use": False, "holder": ""}
        targets = [
            {"address": "127.0.0.1", "port": port, "token": "mine"},
            {"address": "127.0.0.1", "port": other, "token": "mine", "protocol": "udp"},
            {"address": "127.0.0.1", "port": other, "token": "another's", "protocol": "udp"},
            {"address": "127.0.0.1", "port": port, "token": "another's"},
            {"address": "127.0.0.1", "port": idle, "token": "mine"},
            {"address": "127.0.0.1", "port": other, "token": "mine"},
            {"address": "no-such-name.invalid", "port": port, "token": "mine"},
            {"address": "127.0.0.1", "port": port, "token": "mine", "source": "192.0.2.77"},
        ]
        results = dialler.ask("dial", targets=targets, limit=1.0)["results"]
    assert [result["kind"] for result in results] == [
        "ok", "ok", "timeout", "other-host", "refused", "silent", "name", "source",
    ]  # fmt: skip
    assert 0 < results[0]["round_trip"] < 1 and 0 < results[1]["round_trip"] < 1
    target = {"address": "127.0.0.1", "port": port, "token": "mine"}
    rates = dialler.ask("measure", seconds=0.2, limit=2.0, **target)
    assert rates["kind"] == "ok"
    assert min(rates["sent"], rates["received"]) > 1e7
    assert listener.ask("release") == {"closed": 2}
    assert not listening(port)
    with socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", other))
    assert dialler.ask("measure", seconds=0.2, limit=2.0, **target)["kind"] == "refused"


def test_closed_listeners_have_freed_their_ports() -> None:
    [port] = free_ports(1)
    for _ in range(300):  # whether a thread has left its socket in time is chance
        listeners = Listeners()
        listeners.open("127.0.0.1", port, "mine")
        listeners.open_udp("127.0.0.1", port, "mine")
        assert listeners.close() == 2
        with socket.create_server(("127.0.0.1", port)), socket.socket(type=socket.SOCK_DGRAM) as udp:
            udp.bind(("127.0.0.1", port))


def test_its_ports_are_free_when_its_input_ends(start: Callable[..., Probe]) -> None:
    [port] = free_ports(1)
    probe = start()
    probe.ask("listen", token="mine", owner="abc", binds=[["0.0.0.0", port, "tcp"]])
    assert listening(port)
    assert probe.end() == 0
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.0\r\n\r\n", b"x" * 1000, b"geomx-probe mine\n", b"\n"])
def test_a_caller_that_talks_nonsense_harms_nobody(start: Callable[..., Probe], greeting: bytes) -> None:
    [port] = free_ports(1)
    probe = start()
    probe.ask("listen", token="mine", owner="abc", binds=[["127.0.0.1", port, "tcp"]])
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.settimeout(10)
        with suppress(OSError):  # the probe may cut it off while it sends
            caller.sendall(greeting)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(100) == b""
    target = {"address": "127.0.0.1", "port": port, "token": "mine"}
    assert probe.ask("dial", targets=[target], limit=2.0)["results"][0]["kind"] == "ok"


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"id": 1, "do": "explode"}', '{"do": "clock"}', '"x"'])
def test_what_is_no_request_ends_it(start: Callable[..., Probe], line: str) -> None:
    probe = start()
    probe.write(line + "\n")
    assert probe.process.wait(240) == 1


def test_a_request_without_its_fields_is_answered(start: Callable[..., Probe]) -> None:
    probe = start()
    assert "KeyError" in probe.ask("dial")["error"]
    assert probe.ask("clock").keys() == {"clock"}


def test_silence_ends_it() -> None:
    code = "import sys; from geomx_cli.probe.service import Service; sys.exit(Service(0, 1, silence=0.1).run())"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.wait(240) == 0
    process.stdin.close()


@pytest.mark.parametrize("state", ["", "relative", "/absolute"])
def test_hosts_and_the_control_machine_mean_the_same_usual_folder(
    start: Callable[..., Probe], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", state)
    facts = start().ask("facts", ports=[], **{**FACTS, "state_dir": ""})
    assert f"{facts['state']['path']}/jobs" == str(jobs_folder())


def test_a_probe_that_keeps_ports_waits_for_longer() -> None:
    (source, requests), (answers, sink) = os.pipe(), os.pipe()
    thread = threading.Thread(target=Service(source, sink, silence=0.3).run)
    thread.start()
    os.write(requests, b'{"id": 1, "do": "release", "hold": true, "silence": 60}\n')
    thread.join(1.0)
    assert thread.is_alive()
    os.close(requests)
    thread.join()
    for end in (source, answers, sink):
        os.close(end)
