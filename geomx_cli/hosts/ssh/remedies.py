"""Errors of connecting to a host, with their remedies: the same whichever client connects."""

import shlex
from collections.abc import Sequence

from geomx_cli.core.errors import HostUnreachable, WrongHostKey
from geomx_cli.core.untrusted import last_line
from geomx_cli.hosts.ssh.credentials import Hop

__all__ = [
    "AUTH", "AWAY", "BANNER", "TCP", "TURNED_AWAY", "at", "broken", "changed_host_key", "closed_at_once",
    "dead_master", "forwarding_failed", "no_algorithm",
    "no_banner", "no_command", "no_key_exchange", "no_route", "no_session", "no_start", "no_such_name", "not_added",
    "not_let_in", "not_ssh", "opening_a_master", "refused", "revoked_host_key", "second_factor", "silent",
    "slow_authentication",
    "takes_no_keys", "too_many_keys", "unknown_host_key", "unreachable", "wrong_certificate", "wrong_fingerprint",
]  # fmt: skip

TCP = 8.0  # seconds
BANNER = 8.0
AUTH = 20.0
TURNED_AWAY = 6.0  # seconds to retry if sshd closes connections at once because of too many pending ones
AWAY = ("Exceeded MaxStartups", "Not allowed at this time")
"""What an sshd says then, in place of its banner; older ones say nothing."""


def no_such_name(address: str, why: str) -> HostUnreachable:
    return HostUnreachable(
        f"the name {address} is not known: {why}", "correct it in the inventory or in ~/.ssh/config"
    )


def silent(hop: Hop) -> HostUnreachable:
    what = f"{hop} does not answer: no connection within {TCP:g} s"
    return HostUnreachable(what, "is it on, is the address right, does a firewall drop the connection?")


def refused(hop: Hop) -> HostUnreachable:
    return HostUnreachable(f"{hop} refuses the connection", "is sshd running there, and on this port?")


def no_route(hop: Hop) -> HostUnreachable:
    return HostUnreachable(f"there is no route to {hop}", "is the address right, and the network up?")


def unreachable(hop: Hop, why: str) -> HostUnreachable:
    return HostUnreachable(f"{hop} cannot be reached: {why}", "correct the address")


def forwarding_failed(hop: Hop, *, forbidden: bool) -> HostUnreachable:
    """A jump host that does not connect to the next one."""
    what = "the jump host forbids forwarding" if forbidden else "the jump host cannot connect to it"
    hint = "allow AllowTcpForwarding there" if forbidden else "correct the address, or look whether sshd runs"
    return HostUnreachable(f"{hop} cannot be reached: {what}", hint)


def no_banner(hop: Hop) -> HostUnreachable:
    what = f"{hop} accepts connections but sends no SSH banner within {BANNER:g} s"
    return HostUnreachable(what, "is it an SSH server, on this port? It may be overloaded")


def not_ssh(hop: Hop) -> HostUnreachable:
    return HostUnreachable(f"{hop} is not an SSH server", "correct the port")


def closed_at_once(hop: Hop) -> HostUnreachable:
    hint = "its MaxStartups limit may be reached, or it refuses this address"
    return HostUnreachable(f"{hop} closes connections at once", hint)


def no_algorithm(hop: Hop, why: str) -> HostUnreachable:
    hint = "its sshd is too old (SHA-1 keys or exchanges only): update it, OpenSSH 7.2 or newer will do"
    return HostUnreachable(f"no SSH algorithm in common with {hop}: {why}", hint)


def no_key_exchange(hop: Hop, why: str) -> HostUnreachable:
    what = f"{hop} did not complete the SSH key exchange: {why or 'it closed the connection'}"
    return HostUnreachable(what, "see the log of its sshd; it may be overloaded")


def unknown_host_key(hop: Hop, shown: str) -> HostUnreachable:
    """shown: the key's type and fingerprint."""
    where = f"-p {hop.port} {hop.user}@{hop.address}"
    _, _, fingerprint = shown.rpartition(" ")
    return HostUnreachable(
        f"the host key of {hop} is not known: {shown}",
        f"compare it with the machine's own (ssh-keygen -lf) and accept it by `ssh {where}`, or give "
        f'fingerprint = "{fingerprint}" in the inventory, or accept new keys with --accept-new-host-keys',
    )


def changed_host_key(hop: Hop, shown: str, place: str, known: str) -> WrongHostKey:
    """place: file and line of the key that is known. known: its type, and its fingerprint if that is known."""
    return WrongHostKey(
        f"THE HOST KEY OF {hop} HAS CHANGED: it shows {shown}, and {place} has {known}. "
        "This may be a man-in-the-middle attack",
        f"only if you know why it changed: ssh-keygen -R '{hop.trusted_as}' -f {place.rpartition(':')[0]}",
    )


def wrong_fingerprint(hop: Hop, shown: str) -> WrongHostKey:
    what = f"{hop} presents the host key {shown}, but the inventory has {hop.fingerprint}"
    return WrongHostKey(what, "find out why before you correct the fingerprint in the inventory")


def revoked_host_key(hop: Hop, shown: str, place: str) -> WrongHostKey:
    return WrongHostKey(f"{hop} shows a host key that was revoked: {shown}", f"see {place}")


def wrong_certificate(hop: Hop, authority: str, problem: str) -> WrongHostKey:
    """authority: the place where known_hosts has it; "" if that is not known. problem: a clause."""
    signed = f", signed by the authority in {authority}," if authority else ""
    what = f"the certificate of the host key of {hop}{signed} {problem}"
    return WrongHostKey(what, "have its host key signed anew, for the name by which it is dialled")


def not_added(hop: Hop, path: object, why: object) -> HostUnreachable:
    return HostUnreachable(f"the host key of {hop} cannot be added to {path}: {why}", "correct it")


def slow_authentication(hop: Hop, seconds: float) -> HostUnreachable:
    what = f"{hop}: SSH authentication timed out after {seconds:g} s"
    return HostUnreachable(what, "it may be overloaded, or wait for its directory service")


def opening_a_master(hop: Hop) -> str:
    """The command that opens a connection which geomx shares."""
    path = shlex.quote(hop.master or "PATH")
    command = f"ssh -fNM -S {path} -p {hop.port} {shlex.quote(f'{hop.user}@{hop.address}')}"
    return command if hop.master else f"{command}, with ControlPath PATH in ~/.ssh/config"


def takes_no_keys(hop: Hop, tried: Sequence[str], methods: str) -> HostUnreachable:
    why = f"it takes no keys, but {methods}, which geomx does not give"
    hint = (
        "let its sshd accept keys for this account (PubkeyAuthentication, AuthenticationMethods), or log in yourself"
        f" and geomx shares that connection: {opening_a_master(hop)}"
    )
    return not_let_in(hop, tried, [why], hint)


def second_factor(hop: Hop, tried: Sequence[str], methods: str) -> HostUnreachable:
    why = f"it accepts the last one and wants a second factor: {methods}"
    hint = (
        f"geomx gives none: log in yourself, and geomx shares that connection: {opening_a_master(hop)}; or let its sshd"
        " ask this account for a key alone (AuthenticationMethods publickey), at least from this machine (Match User"
        " ... Address ...)"
    )
    return not_let_in(hop, tried, [why], hint)


def too_many_keys(hop: Hop, tried: Sequence[str], count: str) -> HostUnreachable:
    """count: how many keys were tried, as "2 of 4 keys"."""
    why = f"it closed the connection after {count}, as sshd does after its MaxAuthTries"
    hint = "name its key: key in the inventory, or IdentityFile in ~/.ssh/config, or remove others (ssh-add -d)"
    return not_let_in(hop, tried, [why], hint)


def not_let_in(hop: Hop, tried: Sequence[str], why: Sequence[str] = (), hint: str = "") -> HostUnreachable:
    """tried: the keys, with their fingerprints. Without a hint: how to copy the key there."""
    keys = f"tried {', '.join(tried)}" if tried else "there is no key to try"
    key = f"-i {shlex.quote(hop.keys[0] + '.pub')} " if hop.named and hop.keys else ""
    copy = f"ssh-copy-id {key}-p {hop.port} {shlex.quote(f'{hop.user}@{hop.address}')}"
    what = "; ".join([f"SSH authentication failed for {hop}: {keys}", *why])
    return HostUnreachable(what, hint or f"{copy}, or name another user or key in the inventory")


def no_session(host: str, why: str) -> HostUnreachable:
    hint = "MaxSessions in its sshd_config may be too small: 10, the default, is enough"
    return HostUnreachable(f"host {host} opens no session: {why}", hint)


def no_command(host: str, printed: str) -> HostUnreachable:
    """printed: what came in place of the command's output."""
    printed = repr(last_line(printed, "")) if printed.strip() else "nothing"
    hint = "it needs a login shell, and no ForceCommand in sshd_config nor command= in authorized_keys"
    return HostUnreachable(f"host {host}: its account runs no commands; it printed {printed}", hint)


def no_start(host: str, seconds: float) -> HostUnreachable:
    hint = "see whether that machine is overloaded, or what the account's start-up files wait for"
    return HostUnreachable(f"host {host}: its account started no command within {seconds:g} s", hint)


def dead_master(host: str, hop: Hop, seconds: float) -> HostUnreachable:
    what = f"host {host}: the connection that you have opened at {hop.master} started no command within {seconds:g} s"
    command = f"ssh -S {shlex.quote(hop.master)} -O exit {shlex.quote(hop.address)}"
    return HostUnreachable(what, f"it may be dead, as after a sleep of this machine: {command}, and open it again")


def at(host: str, error: HostUnreachable, *, jump: bool = False) -> HostUnreachable:
    """The error with the host's name. jump: it is one of a jump host."""
    return type(error)(f"host {host}: {'jump host: ' * jump}{error.message}", error.hint)


def broken(host: str, why: str = "") -> HostUnreachable:
    message = f"the connection broke: {why}" if why else "the connection broke"
    return HostUnreachable(f"host {host}: {message}", "launch again")
