"""ssh_config files in usual shapes, each with the sshds that it needs."""

import getpass
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sshd import Person, Sshd, make_key

Machines = Callable[..., Sshd]


def sign(authority: Path, public: Path, *options: str) -> None:
    """Make PUBLIC's certificate, beside it."""
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "test", *options, str(public)]
    subprocess.run(command, check=True, capture_output=True)


class World:
    """A host "inner" and a gate, and a user whose ssh_config a test writes."""

    def __init__(self, machines: Machines, person: Person, folder: Path, short: Path) -> None:
        self.person, self.folder, self.short = person, folder, short
        self.start = machines
        self.usual = f"UserKnownHostsFile {person.known_hosts}\n  IdentityFile {person.key}\n"
        self.machines: dict[str, Sshd] = {}
        self.agent: subprocess.Popen[bytes] | None = None
        self.closing: list[str] = []  # the command that closes the user's connection

    def close(self) -> None:
        """End what the sshds do not: the agent, and the user's connection."""
        if self.closing:
            subprocess.run(self.closing, check=True, capture_output=True, timeout=30)
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()

    def machine(self, name: str = "inner", *, settings: tuple[str, ...] = (), known: bool = True) -> Sshd:
        """Start an sshd; its host key is known unless `known` is False."""
        made = self.machines[name] = self.start(name, settings=settings)
        if known:
            with self.person.known_hosts.open("a") as file:
                file.write(f"[{made.address}]:{made.port} {made.host_key}\n")
        return made

    def entry(self, name: str, machine: Sshd, *lines: str, head: str = "Host", usual: bool = True) -> str:
        """An entry of ssh_config."""
        place = [f"HostName {machine.address}", f"Port {machine.port}", *lines]
        return "\n  ".join([f"{head} {name}", *place, *([self.usual] if usual else [])]) + "\n"


def jump_host(world: World) -> str:
    return world.entry("gate", world.machine("gate")) + world.entry("it", world.machine(), "ProxyJump gate")


def proxy_command(world: World) -> str:
    config = world.person.config
    gate = world.entry("gate", world.machine("gate"))
    return gate + world.entry("it", world.machine(), f"ProxyCommand ssh -F {config} -W %h:%p gate")


def proxy_command_of_a_program(world: World) -> str:
    program = world.folder / "relay"
    program.write_text(RELAY)
    return world.entry("it", world.machine(), f"ProxyCommand {sys.executable} {program} %h %p %r")


RELAY = """
import os, socket, sys, threading
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def forward():
    while data := os.read(0, 65536):
        stream.sendall(data)
    stream.shutdown(socket.SHUT_WR)
threading.Thread(target=forward, daemon=True).start()
while data := stream.recv(65536):
    os.write(1, data)
"""


def key_of_an_agent(world: World) -> str:
    place = world.folder / "agent"
    world.agent = subprocess.Popen(["ssh-agent", "-D", "-a", place], stdout=subprocess.DEVNULL)
    own = {"SSH_AUTH_SOCK": str(place)}
    while subprocess.run(["ssh-add", "-l"], check=False, capture_output=True, env=own).returncode != 1:
        assert world.agent.poll() is None
    subprocess.run(["ssh-add", "-q", world.person.key], check=True, env=own)
    known = f"UserKnownHostsFile {world.person.known_hosts}"
    return world.entry("it", world.machine(), f"IdentityAgent {place}", known, usual=False)


def certificate_of_the_user(world: World) -> str:
    authority, key = make_key(world.folder / "ca"), make_key(world.folder / "certified")
    sign(authority, Path(f"{key}.pub"), "-n", getpass.getuser())
    (world.folder / "certified-cert.pub").rename(world.folder / "elsewhere.pub")
    machine = world.machine(settings=(f"TrustedUserCAKeys {authority}.pub", "AuthorizedKeysFile none"))
    lines = [f"IdentityFile {key}", f"CertificateFile {world.folder}/elsewhere.pub"]
    return world.entry("it", machine, *lines, f"UserKnownHostsFile {world.person.known_hosts}", usual=False)


def authority_of_the_host(world: World) -> str:
    authority, host_key = make_key(world.folder / "ca"), world.folder / "machines/inner/host_key"
    machine = world.machine(settings=(f"HostCertificate {host_key}-cert.pub",), known=False)
    machine.vanish()
    sign(authority, Path(f"{host_key}.pub"), "-h", "-n", machine.address)
    machine.start()
    signed = authority.with_suffix(".pub").read_text()
    world.person.known_hosts.write_text(f"@cert-authority [{machine.address}]:{machine.port} {signed}")
    return world.entry("it", machine)


def open_master(world: World) -> str:
    """The account wants a second factor, which the user has given to a connection that is still open."""
    machine = world.machine(settings=("MaxSessions 30",))
    text = world.entry("it", machine, f"ControlPath {world.short}/m-%C")
    world.person.config.write_text(text)
    opening = ["ssh", "-F", str(world.person.config), "-fNM", "it"]
    subprocess.run(opening, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30)
    world.closing = ["ssh", "-F", str(world.person.config), "-O", "exit", "it"]
    machine.change("AuthenticationMethods publickey,password", "PasswordAuthentication yes", *machine.settings)
    return text


def tokens(world: World) -> str:
    machine = world.machine()
    shutil.copy(world.person.key, world.folder / f"{machine.address}-{machine.port}-{getpass.getuser()}-it")
    lines = [f"IdentityFile {world.folder}/%h-%p-%r-%n", f"UserKnownHostsFile {world.person.known_hosts}"]
    return world.entry("it", machine, *lines, usual=False)


def include(world: World) -> str:
    (world.folder / "more.conf").write_text(world.entry("it", world.machine()))
    return f"Include {world.folder}/*.conf\n"


def match_host(world: World) -> str:
    return world.entry("it,other", world.machine(), head="Match originalhost")


def match_exec(world: World) -> str:
    return world.entry('"test %n = it"', world.machine(), head="Match exec")


def alias_with_the_name_of_another(world: World) -> str:
    machine = world.machine(known=False)
    with world.person.known_hosts.open("a") as file:
        file.write(f"key-of-it {machine.host_key}\n")
    return world.entry("it", machine, "HostKeyAlias key-of-it")


CONFIGS: dict[Callable[[World], str], str] = {
    jump_host: "paramiko", proxy_command: "ProxyCommand", proxy_command_of_a_program: "ProxyCommand",
    key_of_an_agent: "paramiko", certificate_of_the_user: "paramiko", authority_of_the_host: "paramiko",
    open_master: "a connection of yours is open", tokens: "paramiko", include: "paramiko", match_host: "paramiko",
    match_exec: "paramiko", alias_with_the_name_of_another: "paramiko",
}  # fmt: skip
"""How the host is reached, and what chooses the client: the reason for OpenSSH's."""
