"""What ssh_config may say of a host, with real sshd processes; and what sshd asks for beyond a key."""

import hashlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs
from sshd import Person, Sshd, make_key

from geomx_cli.agent import processes
from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.core.options import defaults
from geomx_cli.hosts import with_addresses
from geomx_cli.hosts.ssh.config import hop
from geomx_cli.hosts.ssh.connector import SshConnector
from geomx_cli.plan.this_machine import this_machine

Machines = Callable[..., Sshd]


def configured(person: Person, machine: Sshd, *lines: str, known: bool = True) -> SshConnector:
    """A host of which the inventory says nothing, and ssh_config these lines."""
    place = [f"HostName {machine.address}", f"Port {machine.port}"]
    place += [f"UserKnownHostsFile {person.known_hosts}"] * known
    person.config.write_text("\n  ".join(["Host it", *lines, *place]) + "\n")
    return SshConnector(machine.name, person.ssh(address="it"), "python3", options=person.options())


def works(host: SshConnector) -> bool:
    with closing(host):
        return host.run(["echo", "in"], limit=60).output == b"in\n"


def refused(host: SshConnector) -> str:
    with closing(host), pytest.raises(GeomxError) as caught:
        host.run(["true"], limit=60)
    return str(caught.value)


def sign(authority: Path, public: Path, *options: str) -> None:
    """Make PUBLIC's certificate, beside it."""
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "test", *options, str(public)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The socket of an ssh-agent that the environment does not name."""
    place = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", place], stdout=subprocess.DEVNULL)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    while agent_has(place, "-l").returncode != 1:
        assert process.poll() is None
    yield place
    process.kill()
    process.wait()


def agent_has(place: Path, *words: str) -> "subprocess.CompletedProcess[bytes]":
    """Run ssh-add with an agent."""
    return subprocess.run(["ssh-add", *words], check=False, capture_output=True, env={"SSH_AUTH_SOCK": str(place)})


def test_files_and_places_that_ssh_config_names(
    machines: Machines, person: Person, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("GX_HOME", str(person.home))
    machine = machines()
    person.knows(machine)
    assert works(configured(person, machine, "IdentityFile /nowhere", f"IdentityFile {person.key}"))
    said = refused(configured(person, machine, "IdentityFile /nowhere"))
    assert "there is no key to try; ~/.ssh/config names /nowhere, which does not exist" in said
    tokens = ["IdentityFile ${GX_HOME}/.ssh/id_ed25519", 'UserKnownHostsFile "${GX_HOME}/.ssh/known_hosts"']
    assert works(configured(person, machine, *tokens, known=False))
    said = refused(configured(person, machine, "IdentityFile ${GX_NOBODY}/key"))
    assert "identityfile for it in" in said and "has ${GX_NOBODY}, which is not set" in said
    options = configured(person, machine, "IdentityAgent %n-%p-%r-%%")._options
    found = hop(person.ssh(address="it", port=7, user="me"), options)
    assert found.agent == "it-7-me-%"
    assert "has the token %T" in refused(configured(person, machine, "CertificateFile /x/%T"))
    assert "there is no key" in refused(configured(person, machine, f"IdentityAgent {agent}"))
    agent_has(agent, "-q", str(person.key))
    assert works(configured(person, machine, f"IdentityAgent {agent}"))
    assert works(configured(person, machine, f"IdentityAgent {agent}", f"IdentityFile {person.key}.pub"))
    assert "there is no key" in refused(configured(person, machine, "IdentityAgent none"))
    said = refused(configured(person, machine, f"IdentityAgent {tmp_path}/none"))
    assert f"no ssh-agent answers at {tmp_path}/none, which ~/.ssh/config names" in said
    monkeypatch.setenv("GX_AGENT", str(agent))
    assert works(configured(person, machine, "IdentityAgent $GX_AGENT"))


def test_keys_that_cannot_be_used_are_left_out(machines: Machines, person: Person, tmp_path: Path) -> None:
    """As by ssh, which tries the others; without others they are named."""
    machine = machines()
    person.knows(machine)
    (broken := tmp_path / "broken").write_text("no key")
    (elsewhere := make_key(tmp_path / "elsewhere")).unlink()  # its public part is there, and no agent has it
    locked = make_key(tmp_path / "locked", passphrase="secret")
    named = [f"IdentityFile {path}" for path in (broken, elsewhere, locked)]
    assert works(configured(person, machine, *named, f"IdentityFile {person.key}", f"CertificateFile {broken}"))
    assert f"the key {broken} cannot be used" in refused(configured(person, machine, *named))
    said = refused(configured(person, machine, *named, f"IdentityFile {make_key(tmp_path / 'unknown')}"))
    assert "SSH authentication failed" in said
    for path, why in ((broken, "cannot be used"), (elsewhere, "cannot be used"), (locked, "has a passphrase")):
        assert f"the key {path} {why}" in said


@pytest.mark.processes
def test_quotes_tabs_and_tokens(person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = person.options()
    (tmp_path / "more").write_text('IdentityFile "%d/a~b/%%h"\nCertificateFile\t"/c %h"\nCertificateFile=/d\n')
    person.config.write_text(f"Include\t{tmp_path}/more\nIdentityAgent /x/%C-%j\nProxyJump nonesuch\n")
    found = hop(person.ssh(address="it", user="me"), options)
    assert found.absent == (f"{Path.home()}/a~b/%h", "/c it", "/d")
    text = f"{socket.gethostname()}it22menonesuch"
    assert found.agent == f"/x/{hashlib.sha1(text.encode()).hexdigest()}-nonesuch"
    person.config.write_text('UserKnownHostsFile "/a\n')
    with pytest.raises(InvalidSettings, match="No closing quotation"):
        hop(person.ssh(address="it"), person.options())


@pytest.mark.processes
def test_nothing_is_left_of_a_command_of_match_exec_that_does_not_end(
    person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what has left its group, nor what its shell no longer is the parent of."""
    started = tmp_path / "started"
    script = tmp_path / "script"
    script.write_text(f"(sleep 61 & echo $! >> {started})\nsetsid sleep 62 &\necho $! >> {started}\nsleep 63\n")
    person.config.write_text(f'Match exec "sh {script}"\n  User me\n')
    monkeypatch.setattr("geomx_cli.hosts.ssh.config._EXEC", 0.5)
    with pytest.raises(InvalidSettings, match=r"'sh .*' of Match exec does not end within 0.5 s"):
        hop(person.ssh(address="it"), person.options())
    pids = [int(pid) for pid in started.read_text().split()]
    running = [pid for pid in pids if (who := processes.identify(pid)) is not None and processes.exists(who)]
    assert len(pids) == 2 and running == []


@pytest.mark.usefixtures("client")
def test_the_agents_other_keys_are_left_out_with_identities_only(
    machines: Machines, person: Person, tmp_path: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    machine = machines(settings=["MaxAuthTries 2"])
    person.knows(machine)
    for number in range(3):
        agent_has(agent, "-q", str(make_key(tmp_path / f"other{number}")))
    agent_has(agent, "-q", str(person.key))
    place, only = f"IdentityAgent {agent}", "IdentitiesOnly yes"
    assert "it closed the connection after 2 of 4 keys" in refused(configured(person, machine, place))
    said = refused(configured(person, machine, place, only))
    left_out = f"{'any' if person.client == 'openssh' else '4'} keys of the ssh-agent left out, as ~/.ssh/config says"
    assert f"there is no key to try; {left_out} IdentitiesOnly" in said
    said = refused(configured(person, machine, place, only, "IdentityFile /nowhere"))
    assert f"there is no key to try; ~/.ssh/config names /nowhere, which does not exist; {left_out}" in said
    assert works(configured(person, machine, place, only, f"IdentityFile {person.key}"))
    locked = shutil.copy(person.key, tmp_path / "locked")  # without its public part, and nobody is there to be asked
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", locked], check=True)
    assert works(configured(person, machine, place, only, f"IdentityFile {locked}"))


@pytest.mark.usefixtures("client")
def test_certificates_of_users_and_hosts(machines: Machines, person: Person, tmp_path: Path, agent: Path) -> None:
    authority, key = make_key(tmp_path / "ca"), make_key(tmp_path / "key")
    sign(authority, Path(f"{key}.pub"), "-n", Sshd(tmp_path / "x", "x", person).ssh().user)
    certificate = (tmp_path / "key-cert.pub").rename(tmp_path / "elsewhere.pub")
    host_key = tmp_path / "machines/alpha/host_key"
    settings = [f"TrustedUserCAKeys {authority}.pub", f"HostCertificate {host_key}-cert.pub"]
    machine = machines(settings=settings)
    machine.vanish()
    sign(authority, Path(f"{host_key}.pub"), "-h", "-n", "127.0.0.1,other")
    machine.start()
    place = f"[127.0.0.1]:{machine.port}"
    person.known_hosts.write_text(f"@cert-authority {place} {authority.with_suffix('.pub').read_text()}")
    other = make_key(tmp_path / "other")
    sign(other, Path(f"{key}.pub"), "-n", "nobody")  # that of another machine
    named = [f"IdentityFile {key}", f"CertificateFile {key}-cert.pub", f"CertificateFile {certificate}"]
    assert works(configured(person, machine, *named))
    agent_has(agent, "-q", str(key))
    both = [f"CertificateFile {certificate}", f"CertificateFile {key}-cert.pub"]
    assert works(configured(person, machine, f"IdentityAgent {agent}", *both))
    assert "SSH authentication failed" in refused(configured(person, machine, named[0]))
    for options, problems in (
        (["-h", "-n", "omega"], ("is for omega", "is not valid: name is not a listed principal")),
        (["-h", "-V", "20200101:20210101"], ("has expired", "is not valid: expired")),
        (["-h", "-V", "20990101:21000101"], ("is not valid yet", "is not valid: not yet valid")),
    ):
        machine.vanish()
        sign(authority, Path(f"{host_key}.pub"), *options)
        machine.start()
        said = refused(configured(person, machine, *named))
        assert said.startswith("host alpha: the certificate of the host key of ")
        assert problems[person.client == "openssh"] in said
    signed_by = other.with_suffix(".pub").read_text()
    person.known_hosts.write_text(f"@cert-authority {place} {signed_by}")
    assert "host key of" in refused(configured(person, machine, *named))
    person.known_hosts.write_text(f"{place} {machine.host_key}\n@cert-authority {place} {signed_by}")
    assert works(configured(person, machine, f"IdentityFile {person.key}"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "beyond"),
    [
        ("GSSAPIAuthentication yes", ("gssapiauthentication",)),
        ("GSSAPIAuthentication no", ()),
        ("PKCS11Provider /usr/lib/x.so", ("pkcs11provider",)),
        ("PKCS11Provider none", ()),
        ("SecurityKeyProvider internal", ()),
        ("RevokedHostKeys /etc/ssh/revoked", ("revokedhostkeys",)),
        ("IdentityFile KEY", ("identityfile of a security key",)),
    ],
)
def test_what_paramiko_does_not_follow(person: Person, tmp_path: Path, line: str, beyond: tuple[str, ...]) -> None:
    (key := tmp_path / "key").touch()
    (tmp_path / "key.pub").write_text("sk-ssh-ed25519@openssh.com AAAA it")
    person.config.write_text(f"Host it\n  {line.replace('KEY', str(key))}\n")
    assert hop(person.ssh(address="it"), person.options()).beyond == beyond
    assert hop(person.ssh(address="other"), person.options()).beyond == ()


def test_a_command_of_match_exec_runs_once(machines: Machines, person: Person, tmp_path: Path) -> None:
    machine, count = machines(), tmp_path / "count"
    person.knows(machine)
    host = configured(person, machine)
    exists = f'Match exec "echo %h >> {count}; test %h = it"\n  IdentityFile {person.key}\n'
    person.config.write_text(exists + person.config.read_text())
    assert host.address == "127.0.0.1" and works(host) and works(host)
    assert count.read_text() == "it\n"


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["MaxAuthTries 2"],
            "it closed the connection after 2 of 4 keys, as sshd does after its MaxAuthTries (name its key",
        ),
        (
            ["AuthenticationMethods publickey,password", "PasswordAuthentication yes"],
            "it accepts the last one and wants a second factor: password (geomx gives none",
        ),
        (["PubkeyAuthentication no", "PasswordAuthentication yes"], "it takes no keys, but password, which geomx"),
    ],
    ids=["too many keys", "second factor", "no keys"],
)
def test_where_no_key_helps_none_is_to_be_copied(
    machines: Machines, person: Person, tmp_path: Path, settings: list[str], words: str
) -> None:
    machine = machines(settings=settings)
    person.knows(machine)
    wrong = [make_key(tmp_path / f"wrong{number}") for number in range(3)] if "MaxAuthTries 2" in settings else []
    said = refused(configured(person, machine, *(f"IdentityFile {key}" for key in [*wrong, person.key])))
    assert words in said and "ssh-copy-id" not in said


def test_a_proxy_command_concerns_its_host_alone(sites: list[Sshd], person: Person) -> None:
    text = person.config.read_text()
    person.config.write_text(f"Host beta\n  ProxyCommand nc %h %p\nHost gamma\n  ProxyCommand none\n{text}")
    options = person.options()
    inventory = this_machine(defaults(), range(20_000, 20_100))
    hosts = [
        structs.replace(host, address="", access=person.ssh(address=name))
        for host, name in zip(inventory.hosts, ("alpha", "beta", "gamma"), strict=True)
    ]
    found = with_addresses(structs.replace(inventory, hosts=tuple(hosts)), options)
    assert [host.address for host in found.hosts] == ["127.0.0.1"] * 3
    for name in ("alpha", "gamma"):
        assert works(SshConnector(name, person.ssh(address=name), "python3", options=options))
    beta = SshConnector("beta", person.ssh(address="beta"), "python3", options=options)
    said = refused(beta)
    assert "ProxyCommand for beta, which is not supported" in said and "install OpenSSH's client" in said
