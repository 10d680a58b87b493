"""Hosts that OpenSSH's client connects to, in the ways that a user's ssh_config asks for, with real sshd processes."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from getpass import getuser
from pathlib import Path

import pytest
from cluster import ROOT, until
from desk import Desk
from ssh_configs import CONFIGS, Machines, World, jump_host, open_master, proxy_command
from sshd import Person

from geomx_cli.agent import processes
from geomx_cli.core.errors import GeomxError, HostUnreachable, InvalidSettings, TimedOut
from geomx_cli.hosts import closing as closing_all
from geomx_cli.hosts import everywhere
from geomx_cli.hosts.ssh.connector import SshConnector
from geomx_cli.hosts.ssh.openssh_folder import Folder
from geomx_cli.hosts.ssh.openssh_settings import resolved

pytestmark = pytest.mark.processes
BINARY = bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a path short enough for sockets, in which geomx has its own. At the end neither processes of ssh
    nor files of geomx are left.
    """
    with tempfile.TemporaryDirectory(prefix="gx-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        until(lambda: not ssh_processes(folder))
        assert not list(Path(folder).glob("geomx-ssh-*"))


def ssh_processes(folder: str, program: str = "ssh") -> list[int]:
    """The pids of processes of ssh, or of another program, that this test has started."""
    found = []
    for who in processes.marked({"XDG_RUNTIME_DIR": folder}):
        try:
            name = Path(f"/proc/{who.pid}/comm").read_text().strip()
        except OSError:
            continue
        if name == program:
            found.append(who.pid)
    return found


@pytest.fixture
def world(machines: Machines, person: Person, tmp_path: Path, short: Path) -> Iterator[World]:
    """No host yet; the test's ssh_config may start some."""
    made = World(machines, person, tmp_path, short)
    yield made
    made.close()


def connected(world: World, client: str = "openssh", address: str = "it", **fields: str) -> SshConnector:
    """A host of which the inventory says no more than this."""
    world.person.client = client  # type: ignore[assignment]
    return SshConnector("A", world.person.ssh(address=address, **fields), "python3", options=world.person.options())


def refused(host: SshConnector) -> str:
    with closing(host), pytest.raises(GeomxError) as caught:
        host.run(["true"], limit=60)
    return str(caught.value)


@pytest.mark.parametrize("client", ["auto", "openssh"])
@pytest.mark.parametrize("way", CONFIGS, ids=lambda way: way.__name__)
def test_an_ssh_config_in_a_usual_shape(world: World, way: Callable[[World], str], client: str) -> None:
    world.person.config.write_text(way(world))
    with closing(connected(world, client)) as host:
        assert host.address == "127.0.0.1"
        assert host.run(["sh", "-c", "cat; exit 3"], data=b"in", limit=60).output == b"in"
        path = str(world.folder / "there" / "file")
        host.put(path, BINARY)
        assert host.get(path) == BINARY
        stream = host.open(["cat"])
        stream.send(b"to and fro")
        assert stream.receive() == b"to and fro"
        stream.close()
    said = [text for text in world.person.told if "by the program ssh" in text]
    if client == "auto" and CONFIGS[way] != "paramiko":
        assert len(said) == 1 and CONFIGS[way] in said[0]
    else:
        assert not said


@pytest.mark.parametrize("way", [proxy_command, open_master], ids=lambda way: way.__name__)
def test_a_job_on_such_a_host(world: World, desk: Desk, way: Callable[[World], str]) -> None:
    desk.environment["XDG_RUNTIME_DIR"] = str(world.short)
    (desk.folder / ".ssh").mkdir(mode=0o700)
    (desk.folder / ".ssh" / "config").write_text(text := way(world))
    world.person.config.write_text(text)
    machine = world.machines["inner"]

    mark, story = uuid.uuid4().hex, {"*": "forever", "A/worker:1": "saves"}
    lines = desk.inventory(mark, story, [machine, machine]).read_text().splitlines()
    only = ("ssh_port", "user", "key", "fingerprint", "[ssh]", "client")
    lines = [line for line in lines if not line.startswith(only)]
    (file := desk.folder / "it.toml").write_text("\n".join(lines).replace(f'ssh = "{machine.address}"', 'ssh = "it"'))
    launch = desk._launched(mark, "--hosts", str(file), "--detach")
    assert launch.finish() == 0, launch.errors
    assert launch.errors.count("connects by the program ssh") == 1, launch.errors
    until(lambda: "A/worker:1" in desk.geomx("logs").stdout)
    until(lambda: list(Path(machine.state_dir).glob("jobs/*/outputs/A-worker-1/model.bin")))
    fetched = desk.geomx("fetch", "--to", "here")
    assert (desk.folder / "here" / launch.id / "outputs" / "A-worker-1" / "model.bin").exists(), fetched.stderr
    stopped = desk.geomx("stop")
    assert stopped.returncode == 0 and not launch.pids(), stopped.stderr


def test_what_no_ssh_may_be_given(world: World) -> None:
    for address in ("-oProxyCommand=touch /x", "a b", "a\nb"):
        assert "is no name of a machine" in refused(connected(world, address=address))
    for fields in ({"user": "me`id`"}, {"jump": "gate,me;id@gate"}):
        assert "is no name of a machine" in refused(connected(world, **fields))
    world.person.config.write_text("Host it\n  NoSuchWord x\n")
    assert "Bad configuration option: nosuchword" in refused(connected(world))


def test_where_ssh_is_not_installed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.person.config.write_text(world.entry("it", world.machine(), f"ProxyCommand {sys.executable} relay %h %p"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidSettings, match=r"ssh is not installed .*apt install openssh-client"):
        connected(world).run(["true"], limit=60)
    said = refused(connected(world, "auto"))
    assert "ProxyCommand for it, which is not supported by paramiko (install OpenSSH" in said


def test_a_second_factor_is_given_to_a_connection_of_the_users_own(world: World) -> None:
    factor = ("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    machine = world.machine()
    world.person.config.write_text(world.entry("it", machine))
    machine.change(*factor)
    said = refused(connected(world))
    assert "wants a second factor: password (geomx gives none: log in yourself" in said
    command = said.partition("shares that connection: ")[2].partition(";")[0].split()
    assert command[:3] == ["ssh", "-fNM", "-S"] and command[-2:] == [str(machine.port), f"{getuser()}@127.0.0.1"]


def test_nothing_stays_where_geomx_is_killed(world: World) -> None:
    world.person.config.write_text(jump_host(world))
    code = (
        "import sys; from geomx_cli.hosts.ssh.connector import SshConnector as C; from geomx_cli.inventory import Ssh;"
        "from geomx_cli.hosts.ssh.options import SshOptions as O;"
        "host = C('A', Ssh(address='it', client='openssh'), '', options=O(config=sys.argv[1]));"
        "host.open(['cat']); print('open', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(world.person.config)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        assert len(ssh_processes(str(world.short))) >= 3  # the master, the jump host's, and the command's
        process.kill()
    until(lambda: not ssh_processes(str(world.short)))
    (left,) = world.short.glob("geomx-ssh-*")  # the only thing that is left
    used = Folder()
    for path in (left, used.path):
        os.utime(path, (0, 0))  # long ago
    Folder().remove()
    assert used.path.exists() and not left.exists()
    used.remove()


def test_a_host_that_hangs_behind_a_connection_of_the_users_own(world: World) -> None:
    world.person.config.write_text(open_master(world))
    machine = world.machines["inner"]
    with closing(connected(world)) as host:
        channel = host.open(["cat"])
        stopped = [pid for pid in machine.sessions() if Path(f"/proc/{pid}").exists()]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(HostUnreachable, match="the connection broke"):
                host.run(["sleep", "30"], limit=60)
            assert channel.receive() == b""
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


def test_a_connection_of_the_users_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is trusted where nobody else can put another in its place, and named where it is dead."""
    world.person.config.write_text(open_master(world))
    with closing(connected(world, fingerprint="SHA256:another")) as host:
        assert host.run(["echo", "in"], limit=60).output == b"in\n"
    assert [text for text in world.person.told if "does not compare the fingerprint of host A" in text]
    world.short.chmod(0o777)
    assert "wants a second factor" in refused(connected(world))
    assert "another account could listen there" in world.person.told[-1]
    world.short.chmod(0o700)
    monkeypatch.setattr("geomx_cli.hosts.ssh.by_openssh._START", 1.0)
    stopped = world.machines["inner"].sessions()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        said = refused(connected(world))
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert f"opened at {world.short}/m-" in said and "started no command within 1 s" in said
    assert f"ssh -S {world.short}/m-" in said and " -O exit 127.0.0.1" in said


def test_keywords_that_concern_host_keys(world: World, tmp_path: Path) -> None:
    machine = world.machine(known=False)
    entry = world.entry("it", machine, "FingerprintHash md5", "GSSAPIKeyExchange yes", head="IgnoreUnknown *\nHost")
    world.person.config.write_text(entry)
    assert machine.fingerprint in refused(connected(world))
    options = world.person.options()
    found = resolved(world.person.ssh(address="it"), options, tmp_path)
    shown = subprocess.run(["ssh", "-G", *found.arguments, "it"], capture_output=True, text=True, check=True).stdout
    assert "gssapikeyexchange yes" not in shown.lower()
    command = f"KnownHostsCommand /bin/echo [{machine.address}]:{machine.port} {machine.host_key}"
    world.person.config.write_text(world.entry("it", machine, command))
    assert "the inventory has SHA256:another" in refused(connected(world, fingerprint="SHA256:another"))
    with closing(connected(world, fingerprint=machine.fingerprint)) as host:
        assert host.run(["echo", "in"], limit=60).output == b"in\n"


def test_a_host_that_opens_no_more_sessions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.person.config.write_text(world.entry("it", world.machine(settings=("MaxSessions 2",))))
    with closing(connected(world)) as host:
        with closing(host.open(["cat"])), pytest.raises(HostUnreachable, match="host A opens no session: Session open"):
            host.run(["true"], limit=60)
        until(lambda: host.run(["true"], limit=60).status == 0)
        (log,) = world.short.glob("geomx-ssh-*/log")
        assert "Authenticating to" in log.read_text()
        monkeypatch.setattr("geomx_cli.hosts.ssh.by_openssh._MOST_LOGGED", 0)
        host.run(["true"], limit=60)  # it begins anew
        assert "Authenticating to" not in log.read_text()


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_many_hosts_at_once_behind_a_gate_that_turns_some_away(world: World, client: str) -> None:
    gate = world.entry("gate", world.machine("gate", settings=("MaxStartups 2:100:2",)))
    world.person.config.write_text(gate + world.entry("it", world.machine(), "ProxyJump gate"))
    hosts = [connected(world, client) for _ in range(8)]
    with closing_all({str(number): host for number, host in enumerate(hosts)}):
        done = everywhere(lambda host: host.run(["echo", "in"], limit=60), hosts)
    assert [each.output for each in done] == [b"in\n"] * 8
    assert "past MaxStartups" in world.machines["gate"].log.read_text()


def test_waits_have_a_limit_and_a_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geomx_cli.hosts.ssh.by_openssh._CONNECT", 1.5)
    command = ("AuthorizedKeysFile none", "AuthorizedKeysCommand /bin/sleep 30", "AuthorizedKeysCommandUser root")
    slow = world.machine("slow", settings=command)
    world.person.config.write_text(world.entry("it", slow))
    assert "SSH authentication timed out after 1.5 s (it may be overloaded" in refused(connected(world))
    slow.change("ForceCommand while sleep 0.3 && echo wait; do :; done")
    assert "host A: its account started no command within 1.5 s" in refused(connected(world))
    world.person.config.write_text("Host it\n  ProxyCommand sleep 600\n")
    assert "does not answer" in refused(connected(world))
    until(lambda: not ssh_processes(str(world.short), "sleep"), 30)
    monkeypatch.setattr("geomx_cli.hosts.ssh.openssh_settings._RESOLVE", 0.5)
    world.person.config.write_text('Match exec "sleep 61"\n  User me\n')
    with pytest.raises(TimedOut, match=r"`ssh -G it` did not end within 0.5 s"):
        connected(world).run(["true"], limit=60)


def test_errors_of_a_jump_host_are_told_from_those_of_the_host(world: World) -> None:
    world.person.config.write_text(jump_host(world))
    gate, inner = world.machines["gate"], world.machines["inner"]
    known = world.person.known_hosts.read_text()
    world.person.known_hosts.write_text(known.replace(gate.host_key, inner.host_key))
    said = refused(connected(world))
    assert said.startswith(f"host A: jump host: THE HOST KEY OF {getuser()}@127.0.0.1 port {gate.port} HAS CHANGED")
    assert gate.fingerprint in said and f"{world.person.known_hosts}:1 has ssh-ed25519 {inner.fingerprint}" in said
    world.person.known_hosts.write_text(known.splitlines()[0] + "\n")
    said = refused(connected(world))
    assert said.startswith(f"host A: the host key of {getuser()}@127.0.0.1 port {inner.port} is not known")
    world.person.known_hosts.write_text("")
    world.person.client = "openssh"
    options = world.person.options(accept_new_host_keys=True)
    with closing(SshConnector("A", world.person.ssh(address="it"), "python3", options=options)) as host:
        assert host.run(["true"], limit=60).status == 0
    told = "\n".join(world.person.told)
    assert gate.fingerprint in told and inner.fingerprint in told
    world.person.known_hosts.unlink()
    world.person.known_hosts.mkdir()
    said = refused(SshConnector("A", world.person.ssh(address="it"), "python3", options=options))
    assert said.startswith("host A: the host key of ") and f"cannot be added to {world.person.known_hosts}" in said
