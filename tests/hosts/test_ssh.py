"""Hosts behind SSH, with real sshd processes: commands, authentication, and error messages."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import paramiko
import pytest
from cluster import ROOT
from sshd import Person, Sshd, make_key

from geomx_cli.agent import processes
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, InvalidSettings, TimedOut
from geomx_cli.hosts import connector, everywhere
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.hosts.ssh.config import hops
from geomx_cli.hosts.ssh.connector import SshConnector
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Host, Ssh
from geomx_cli.preflight.probe_pool import ProbePool

Machines = Callable[..., Sshd]
BINARY = bytes(range(256)) * 20_000


def _error(host: SshConnector) -> str:
    """The error message when the host is used."""
    with pytest.raises(HostUnreachable) as caught:
        host.run(["true"], limit=60)
    host.close()
    return str(caught.value)


pytestmark = pytest.mark.usefixtures("client")
PARAMIKO_ONLY = pytest.mark.parametrize("client", ["paramiko"], indirect=True)


@pytest.fixture
def host(machines: Machines, person: Person) -> Iterator[SshConnector]:
    """A host behind its own sshd."""
    machine = machines()
    person.knows(machine)
    made = machine.host()
    yield made
    made.close()


def test_run_gives_output_errors_and_status(host: SshConnector) -> None:
    done = host.run(["sh", "-c", "cat; echo words >&2; exit 7"], data=b"in", limit=60)
    assert (done.status, done.output, done.errors) == (7, b"in", b"words\n")
    assert host.run(["printf", "%s|", "a b", "$HOME", "'", "*"], limit=60).output == b"a b|$HOME|'|*|"
    assert host.run(["sh", "-c", "exit 255"], limit=60).status == 255
    assert host.run(["sh", "-c", "kill -9 $$"], limit=60).status in (-1, 255)  # which, ssh does not say
    assert b"not found" in host.run(["no-such-program"], limit=60).errors
    with pytest.raises(TimedOut, match=r"sleep on alpha did not end within 0.3 s"):
        host.run(["sleep", "30"], limit=0.3)


def test_much_output_on_both_streams_and_much_input(host: SshConnector) -> None:
    done = host.run(["sh", "-c", "tee /dev/stderr"], data=BINARY, limit=60)
    assert done.output == BINARY and done.errors == BINARY
    assert host.run(["true"], data=BINARY, limit=60).status == 0


def test_open_streams_both_ways(host: SshConnector) -> None:
    channel = host.open(["sh", "-c", "echo oops >&2; cat"])
    sender = threading.Thread(target=lambda: (channel.send(BINARY), channel.close(), channel.close()))
    sender.start()
    got = b""
    while data := channel.receive():
        got += data
    sender.join()
    assert got == BINARY
    assert channel.errors() == "oops\n"
    with pytest.raises(OSError):
        channel.send(b"more")


def test_channel_that_is_closed_takes_no_more(host: SshConnector) -> None:
    channel = host.open(["sleep", "30"])
    channel.close()
    with pytest.raises(OSError):
        channel.send(b"more")


def test_answers_without_end_are_refused(host: SshConnector, tmp_path: Path) -> None:
    for stream in ("cat /dev/zero", "cat /dev/zero >&2"):
        with pytest.raises(CheckFailed, match="sh on alpha wrote more than 16 MiB"):
            host.run(["sh", "-c", stream], limit=60)
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    with pytest.raises(OSError, match="it has more than 16 MiB"):
        host.get(str(tmp_path / "large"))


def test_sshd_without_sftp(machines: Machines, person: Person) -> None:
    machine = machines(settings=["Subsystem no-sftp internal-sftp"])
    person.knows(machine)
    with closing(machine.host()) as host, pytest.raises(HostUnreachable) as caught:
        host.put("/none", b"")
    assert str(caught.value) == (
        "host alpha takes no files: its sshd has no SFTP (its sshd_config needs the line: Subsystem sftp internal-sftp)"
    )
    with closing(machine.host()) as host, ProbePool({"alpha": host}) as probes:
        assert str(probes.failures["alpha"]) == str(caught.value), "known before anything is started"


@pytest.mark.parametrize("forced", ["echo 'for git only'", "echo 'for git only' >&2; exit 1", "exit 3"])
def test_account_that_runs_no_commands(machines: Machines, person: Person, forced: str) -> None:
    machine = machines(settings=[f"ForceCommand {forced}"])
    person.knows(machine)
    with closing(machine.host()) as host:
        with pytest.raises(HostUnreachable) as caught:
            host.run(["true"], limit=60)
        printed = "nothing" if forced == "exit 3" else "'for git only'"
        assert f"host alpha: its account runs no commands; it printed {printed} (it needs a login" in str(caught.value)
        with pytest.raises(HostUnreachable, match="its account runs no commands"):
            host.put("/none", b"")
    with closing(machine.host()) as host, ProbePool({"alpha": host}) as probes:
        assert str(probes.failures["alpha"]) == str(caught.value)


def test_start_up_files_that_print_into_sftp(machines: Machines, person: Person) -> None:
    machine = machines(settings=["Subsystem sftp /usr/lib/openssh/sftp-server"])
    person.knows(machine)
    (machine.home / ".bashrc").write_text("echo Welcome to this machine\n")
    with closing(machine.host()) as host, pytest.raises(HostUnreachable, match="takes no files: something prints"):
        host.put("/none", b"")
    (machine.home / ".bashrc").write_text("")
    with closing(machine.host()) as host:
        host.put(str(machine.home / "file"), BINARY)
        assert host.get(str(machine.home / "file")) == BINARY


@pytest.mark.processes
def test_closing_does_not_wait_for_a_connection_that_is_made(person: Person) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        ssh = person.ssh(address="127.0.0.1", port=mute.getsockname()[1], key=str(person.key))
        host = SshConnector("A", ssh, "python3", options=person.options())
        connecting = threading.Thread(target=lambda: _error(host))
        connecting.start()
        stream, _ = mute.accept()
        host.close()
        assert connecting.is_alive()
        mute.close()  # refuses the next attempt
        stream.close()
        connecting.join()


def test_put_and_get(host: SshConnector, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    host.put(str(path), BINARY, 0o750)
    assert host.get(str(path)) == BINARY
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in (path, path.parent, path.parent.parent)] == [
        0o750, 0o700, 0o700,
    ]  # fmt: skip
    host.put(str(path), b"two")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"two", 0o600)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        host.get(str(tmp_path / "none"))
    with pytest.raises(OSError):
        host.put(f"{path}/below", b"")


def test_folder_that_another_host_of_the_machine_makes_first(
    host: SshConnector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = paramiko.SFTPClient.mkdir

    def overtaken(files: paramiko.SFTPClient, path: str, mode: int = 0o777) -> None:
        mkdir(files, path, mode)
        (tmp_path / "jobs" / "one").mkdir(exist_ok=True)

    monkeypatch.setattr(paramiko.SFTPClient, "mkdir", overtaken)
    host.put(str(tmp_path / "jobs" / "one" / "file"), BINARY)
    assert (tmp_path / "jobs" / "one" / "file").read_bytes() == BINARY


def test_threads_share_a_host(host: SshConnector, tmp_path: Path) -> None:
    def use(number: int) -> bytes:
        host.put(str(tmp_path / "shared" / str(number)), b"%d" % number)
        return host.run(["cat", str(tmp_path / "shared" / str(number))], limit=60).output

    assert everywhere(use, range(6)) == [b"%d" % number for number in range(6)]


def test_what_start_up_files_print_is_left_out(machines: Machines, person: Person) -> None:
    machine = machines()
    person.knows(machine)
    (machine.home / ".bashrc").write_text("echo Welcome; printf 'to this machine'\n")
    with closing(machine.host()) as host:
        assert host.run(["cat"], data=BINARY, limit=60).output == BINARY
        channel = host.open(["echo", "own words"])
        assert b"".join(iter(channel.receive, b"")) == b"own words\n"


def test_open_host_tells_this_machine_from_others(machines: Machines, person: Person) -> None:
    there, here = Host(name="A", parties=("A",), access=machines().ssh()), Host(name="B", parties=("B",))
    assert isinstance(connector(there, "python3", person.options()), SshConnector)
    assert isinstance(connector(here, "python3", SshOptions()), LocalConnector)


def test_unknown_host_key_is_refused_and_accepted_on_demand(machines: Machines, person: Person) -> None:
    machine = machines()
    said = _error(machine.host())
    assert f"the host key of {machine.ssh().user}@127.0.0.1 port {machine.port} is not known" in said
    assert machine.fingerprint in said and f"`ssh -p {machine.port} " in said and "--accept-new-host-keys" in said
    person.known_hosts.write_text("# no end of line")
    host = machine.host(options=person.options(accept_new_host_keys=True))
    assert host.run(["true"], limit=60).status == 0
    host.close()
    assert person.known_hosts.read_text().startswith("# no end of line\n")
    assert _known(person, machine) == machine.host_key
    assert machine.fingerprint in person.told[0]
    machine.host().run(["true"], limit=60)


def _known(person: Person, machine: Sshd) -> str:
    """The machine's key in known_hosts, where ssh may hash its name."""
    command = ["ssh-keygen", "-F", f"[127.0.0.1]:{machine.port}", "-f", person.known_hosts]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(found.splitlines()[1].split()[1:3])


def test_changed_host_key_is_refused_whatever_was_asked_for(machines: Machines, person: Person, tmp_path: Path) -> None:
    machine = machines()
    other = Path(f"{make_key(tmp_path / 'other')}.pub").read_text()
    person.known_hosts.write_text(f"[127.0.0.1]:{machine.port} {other}")
    for accept in (False, True):
        said = _error(machine.host(options=person.options(accept_new_host_keys=accept)))
        assert "HAS CHANGED" in said and f"{person.known_hosts}:1 has" in said and machine.fingerprint in said
        assert f"ssh-keygen -R '[127.0.0.1]:{machine.port}' -f {person.known_hosts}" in said
    assert person.known_hosts.read_text() == f"[127.0.0.1]:{machine.port} {other}"


def test_a_key_of_another_port_refuses_nothing(machines: Machines, person: Person, tmp_path: Path) -> None:
    machine = machines()
    person.known_hosts.write_text("127.0.0.1 " + Path(f"{make_key(tmp_path / 'other')}.pub").read_text())
    assert "is not known" in _error(machine.host())
    assert machine.host(options=person.options(accept_new_host_keys=True)).run(["true"], limit=60).status == 0
    assert _known(person, machine) == machine.host_key


def test_a_program_in_the_home_there(machines: Machines, person: Person) -> None:
    machine = machines()
    person.knows(machine)
    program = machine.home / "my tools" / "say"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho said $1\n")
    program.chmod(0o700)
    with closing(machine.host()) as host:
        assert host.run(["~/my tools/say", "~/x"], limit=60).output == b"said ~/x\n"


@PARAMIKO_ONLY
@pytest.mark.processes
def test_a_jump_as_ssh_config_writes_it(person: Person) -> None:
    person.config.write_text("Host x\n  ProxyJump ssh://u@g:2202/\n")
    first, last = hops(person.ssh(address="x"), person.options())
    assert (first.user, first.address, first.port, last.address) == ("u", "g", 2202, "x")


def test_pinned_fingerprint_decides_alone(machines: Machines, person: Person) -> None:
    machine = machines()
    machine.host(fingerprint=machine.fingerprint).run(["true"], limit=60)
    person.knows(machine)
    assert "the inventory has SHA256:none" in _error(machine.host(fingerprint="SHA256:none"))


@pytest.mark.parametrize("form", ["hashed", "pattern", "rsa", "revoked", "without port"])
def test_forms_of_known_hosts(machines: Machines, person: Person, tmp_path: Path, form: str) -> None:
    rsa = make_key(tmp_path / "rsa", kind="rsa" if form == "rsa" else "ecdsa")
    machine = machines(settings=[f"HostKey {rsa}"])
    name = f"[127.0.0.1]:{machine.port}"
    lines = {
        "rsa": f"{name} {Path(f'{rsa}.pub').read_text()}",
        "pattern": f"example.org,[127.*]:* {machine.host_key}",
        "revoked": f"{name} {machine.host_key}\n@revoked * {machine.host_key}",
        "without port": f"127.0.0.1 {machine.host_key}",
    }
    person.known_hosts.write_text(lines.get(form, f"{name} {machine.host_key}") + "\n")
    if form == "hashed":
        subprocess.run(["ssh-keygen", "-H", "-f", person.known_hosts], check=True, capture_output=True)
        assert name not in person.known_hosts.read_text()
    if form == "revoked":
        assert "was revoked" in _error(machine.host())
    else:
        machine.host().run(["true"], limit=60)


def test_wrong_key_names_user_and_keys(machines: Machines, person: Person, tmp_path: Path) -> None:
    machine = machines()
    person.knows(machine)
    wrong = make_key(tmp_path / "wrong")
    said = _error(machine.host(key=str(wrong)))
    assert f"{machine.ssh().user}@127.0.0.1 port {machine.port}: tried {wrong} (SHA256:" in said
    assert f"ssh-copy-id -i {wrong}.pub -p {machine.port}" in said
    assert "cannot be used" in _error(machine.host(key=str(tmp_path / "none")))
    said = _error(machine.host(key=f"{person.key}.pub"))
    assert f"{person.key}.pub is a public key" in said or f"the key {person.key}.pub cannot be used" in said


@PARAMIKO_ONLY
def test_passphrase_without_terminal(machines: Machines, person: Person, tmp_path: Path) -> None:
    machine = machines()
    locked = make_key(tmp_path / "locked", "a passphrase")
    said = _error(machine.host(key=str(locked)))
    assert "has a passphrase, and there is no terminal to ask for it" in said and f"ssh-add {locked}" in said


def test_key_of_the_ssh_agent(
    machines: Machines, person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines()
    person.knows(machine)
    socket_path = str(tmp_path / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket_path], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket_path)
        # The socket file exists before the agent listens; ssh-add exits with 1 once an agent without keys answers.
        while subprocess.run(["ssh-add", "-l"], check=False, capture_output=True).returncode != 1:
            assert agent.poll() is None
        monkeypatch.setenv("HOME", str(tmp_path / "empty"))
        assert "there is no key to try" in _error(machine.host(key=""))
        subprocess.run(["ssh-add", "-q", person.key], check=True)
        machine.host(key="").run(["true"], limit=60)
        locked = make_key(tmp_path / "locked", "a passphrase")
        said = _error(machine.host(key=str(locked)))
        assert "no terminal" in said or f"tried {locked}" in said
    finally:
        agent.kill()
        agent.wait()


PROMPT = """
import sys
from geomx_cli.hosts import everywhere
from geomx_cli.hosts.ssh.connector import SshConnector
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Ssh
options = SshOptions(config="/none", known_hosts=sys.argv[1])
ssh = Ssh(address="127.0.0.1", port=int(sys.argv[2]), key=sys.argv[3])
hosts = [SshConnector(name, ssh, "python3", options=options) for name in "ABC"]
everywhere(lambda host: host.run(["true"], limit=60), hosts)
print("all in")
"""


@PARAMIKO_ONLY
def test_passphrase_is_asked_for_once(machines: Machines, person: Person, tmp_path: Path) -> None:
    locked = make_key(tmp_path / "locked", "a passphrase")
    machine = machines(settings=[f"AuthorizedKeysFile {locked}.pub"])
    person.knows(machine)
    root = str(ROOT)
    argv = [sys.executable, "-c", PROMPT, str(person.known_hosts), str(machine.port), str(locked)]
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execve(argv[0], argv, {**os.environ, "PYTHONPATH": root, "SSH_AUTH_SOCK": ""})
    text = b""
    try:
        while b"all in" not in text and (data := os.read(terminal, 1 << 16)):
            text += data
            if data.rstrip().endswith(b"locked:"):
                answer = b"wrong\n" if text.count(b"passphrase of") == 1 else b"a passphrase\n"
                os.write(terminal, answer)
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert b"all in" in text and text.count(b"passphrase of") == 2, text


@pytest.mark.processes
def test_refused_port_unknown_name_and_no_ssh(person: Person) -> None:
    def say(**place: Any) -> str:
        return _error(SshConnector("A", person.ssh(key=str(person.key), **place), "python3", options=person.options()))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        said = say(address="127.0.0.1", port=port)
        assert said.startswith("host A: ") and "refuses the connection (is sshd running there" in said
        taken.listen()
        answering = threading.Thread(target=_answer, args=(taken,))
        answering.start()
        assert "is not an SSH server" in say(address="127.0.0.1", port=port)
        answering.join()
    assert "the name no-such-machine.invalid is not known" in say(address="no-such-machine.invalid")


def _answer(listener: socket.socket) -> None:
    with listener.accept()[0] as stream:
        stream.recv(4096)
        stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.processes
def test_machine_that_accepts_and_says_nothing(person: Person) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        ssh = person.ssh(address="127.0.0.1", port=mute.getsockname()[1], key=str(person.key))
        said = _error(SshConnector("A", ssh, "python3", options=person.options()))
    assert "accepts connections but sends no SSH banner within 8 s" in said


def test_sshd_that_knows_only_sha1(machines: Machines) -> None:
    machine = machines(settings=["KexAlgorithms diffie-hellman-group14-sha1"])
    assert "no SSH algorithm in common" in (said := _error(machine.host())) and "its sshd is too old (SHA-1" in said


def test_sshd_that_opens_no_session(machines: Machines, person: Person) -> None:
    machine = machines(settings=["MaxSessions 0"])
    person.knows(machine)
    assert "host alpha opens no session" in _error(machine.host())


def test_machine_that_hangs_after_it_let_us_in(machines: Machines, person: Person) -> None:
    machine = machines()
    person.knows(machine)
    host = machine.host()
    host.run(["true"], limit=60)
    for pid in machine.sessions():
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(GeomxError):
        host.run(["true"], limit=1)
    machine.cut()
    assert host.run(["true"], limit=60).status == 0
    host.close()


def test_dropped_connection_ends_what_waits_for_it(machines: Machines, person: Person) -> None:
    machine = machines()
    person.knows(machine)
    host = machine.host()
    channel = host.open(["cat"])
    waiting = threading.Thread(target=lambda: _cut_soon(machine))
    waiting.start()
    with pytest.raises(HostUnreachable, match="the connection broke"):
        host.run(["sleep", "30"], limit=30)
    waiting.join()
    assert channel.receive() == b""
    with pytest.raises(OSError):
        channel.send(b"x")
    assert host.run(["echo", "again"], limit=60).output == b"again\n"
    host.close()


def test_cut_while_a_file_is_put(machines: Machines, person: Person, tmp_path: Path) -> None:
    machine = machines()
    person.knows(machine)
    host = machine.host()
    host.run(["true"], limit=60)
    folder = tmp_path / "there"
    folder.mkdir()

    def cut_soon() -> None:
        while not list(folder.iterdir()):
            time.sleep(0.002)
        machine.cut()

    waiting = threading.Thread(target=cut_soon)
    waiting.start()
    with pytest.raises(HostUnreachable, match="the connection broke") as caught:
        host.put(str(folder / "large"), bytes(256 << 20))
    waiting.join()
    assert not caught.value.message.endswith(": ")
    host.close()


def test_the_file_server_alone_ends_while_a_file_is_put(machines: Machines, person: Person, tmp_path: Path) -> None:
    machine = machines()
    person.knows(machine)
    host = machine.host()
    folder = tmp_path / "there"
    folder.mkdir()

    def end_soon() -> None:
        while not list(folder.iterdir()):
            time.sleep(0.002)
        assert machine.process is not None
        for who in processes.descendants(machine.process.pid):
            if "sftp" in Path(f"/proc/{who.pid}/cmdline").read_text():
                os.kill(who.pid, signal.SIGKILL)

    waiting = threading.Thread(target=end_soon)
    waiting.start()
    with pytest.raises(HostUnreachable, match="the connection broke"):
        host.put(str(folder / "large"), bytes(256 << 20))
    waiting.join()
    host.put(str(folder / "small"), b"again")
    assert (folder / "small").read_bytes() == b"again"
    host.close()


def _cut_soon(machine: Sshd) -> None:
    while "sleep" not in str(_commands(machine)):
        time.sleep(0.02)
    machine.cut()


def _commands(machine: Sshd) -> list[str]:
    assert machine.process is not None
    found = (Path(f"/proc/{who.pid}/cmdline") for who in processes.descendants(machine.process.pid))
    return [path.read_text() for path in found if path.exists()]


def test_alias_jump_and_chain_of_jumps(sites: list[Sshd], person: Person) -> None:
    alpha, beta, gamma = sites
    options = person.options()

    def through(ssh: Ssh) -> None:
        host = SshConnector("A", ssh, "python3", options=options)
        assert host.run(["echo", "there"], limit=60).output == b"there\n"
        host.close()

    through(person.ssh(address="alpha"))
    through(person.ssh(address="gamma", jump="alpha"))
    assert "Accepted publickey" in alpha.log.read_text() and "Accepted publickey" in gamma.log.read_text()
    through(person.ssh(address="gamma", jump=f"alpha,{gamma.ssh().user}@127.0.0.1:{beta.port}", key=str(person.key)))
    assert "Accepted publickey" in beta.log.read_text()
    with person.config.open("a") as config:
        config.write("Host delta\n  HostName 127.0.0.1\n  HostKeyAlias gamma-key\n  ProxyJump beta\n")
        config.write(f"  Port {gamma.port}\n  IdentityFile {person.key}\n")
    with person.known_hosts.open("a") as known:
        known.write(f"gamma-key {gamma.host_key}\n")
    through(person.ssh(address="delta"))


def test_jump_that_leads_nowhere(sites: list[Sshd], person: Person) -> None:
    sites[2].stop()
    said = _error(SshConnector("A", person.ssh(address="gamma", jump="alpha"), "python3", options=person.options()))
    assert "cannot be reached: the jump host cannot connect to it" in said
    sites[0].stop()
    said = _error(SshConnector("A", person.ssh(address="gamma", jump="alpha"), "python3", options=person.options()))
    assert said.startswith("host A: jump host: ") and "refuses the connection" in said


@PARAMIKO_ONLY
def test_inventory_wins_over_ssh_config(sites: list[Sshd], person: Person, tmp_path: Path) -> None:
    included = tmp_path / "home" / ".ssh" / "more"
    included.write_text("Host omega\n  Port 1\n  User nobody\n  IdentityFile /none\n")
    text = person.config.read_text()
    before = f"Include more\nUserKnownHostsFile {person.known_hosts}\n"
    person.config.write_text(f"{before}{text}Host omega\n  HostName ::1\n")
    ssh = sites[0].ssh(address="omega")
    said = _error(SshConnector("A", ssh, "python3", options=person.options()))
    assert f"{ssh.user}@::1 port {ssh.port} refuses" in said
    omega = SshConnector("A", person.ssh(address="omega"), "python3", options=person.options())
    assert "nobody@::1 port 1 refuses" in _error(omega)


@PARAMIKO_ONLY
@pytest.mark.processes
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("Host x\n  ProxyCommand nc %h %p\n", "ProxyCommand for x, which is not supported"),
        ("Host x\n  ProxyJump x\n", "the jumps on the way to x have no end"),
        ("Host x\n  ProxyJump a:b:c\n", "the name a:b:c is not known"),
        ("Host x\n  ProxyJump g:99999\n", "'g:99999' is no machine to jump over"),
        ("Host x\n  Port abc\n", "has Port abc for x, which is no port"),
    ],
)
def test_ssh_config_that_cannot_be_used(person: Person, config: str, words: str) -> None:
    person.config.write_text(config)
    with pytest.raises((InvalidSettings, HostUnreachable), match=words):
        SshConnector("A", person.ssh(address="x"), "python3", options=person.options()).run(["true"], limit=60)


def test_ipv6(machines: Machines, person: Person) -> None:
    machine = machines(address="::1")
    person.knows(machine)
    host = machine.host()
    assert host.run(["echo", "six"], limit=60).output == b"six\n"
    host.close()
