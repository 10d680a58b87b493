"""Says why OpenSSH's client did not connect, by what it logs with -v."""

import re
from collections.abc import Callable, Iterable, Sequence

from geomx_cli.core.errors import HostUnreachable
from geomx_cli.core.untrusted import plain
from geomx_cli.hosts.ssh import remedies
from geomx_cli.hosts.ssh.credentials import Hop
from geomx_cli.hosts.ssh.host_keys import key_at
from geomx_cli.hosts.ssh.openssh_settings import Settings

__all__ = ["TurnedAway", "accepted_keys", "refusal"]

_AUTHENTICATING = re.compile(r"debug1: Authenticating to (\S+):(\d+) as '(.*)'$")
_OFFERED = re.compile(r"debug1: Offering public key: (.*) (\S+ SHA256:\S+)")
_ATTEMPTED = re.compile(r"debug1: Will attempt key: .* SHA256:")
_ACCEPTED = re.compile(r"debug1: Server accepts key: (.*?) (?:\S+ )?SHA256:")
_CONTINUE = re.compile(r"debug1: Authentications that can continue: (\S+)")
_HOST_KEY = re.compile(r"debug1: Server host (?:key|certificate): (\S+ SHA256:[^\s,]+)")
_ADDED = re.compile(r"Warning: Permanently added .* to the list of known hosts")
_NOT_ADDED = re.compile(r"Failed to add the host to the list of known hosts \((.*)\)")
_PROGRESS = (
    "debug1:", "debug2:", "OpenSSH_", "Authenticated to ", "Transferred: ", "Bytes per second: ", "kex_exchange_",
    "Connection closed by ", "Connection reset by ",
)  # fmt: skip
_PARTIAL = "partial success"


class TurnedAway(Exception):
    """A host closed the connection before it sent its banner, as an sshd with too many pending connections does.

    error: to be raised if it does so again and again.
    """

    def __init__(self, error: HostUnreachable) -> None:
        super().__init__()
        self.error = error


class _Log:
    """The lines of a connection that failed, from where its last hop began: jump hosts log in first."""

    def __init__(self, lines: Iterable[str], settings: Settings) -> None:
        self.target = settings.hop
        self.lines = [plain(line).rstrip() for line in lines]
        self.hop, self.indirect = settings.hop, settings.indirect
        self.authenticating = False
        for number, line in enumerate(self.lines):
            if found := _AUTHENTICATING.match(line):
                self.authenticating, start = True, number
                self.hop = self._of(found[1], int(found[2]), found[3])
                self.last = self.lines[start:]
        if not self.authenticating:
            self.last = self.lines

    def _of(self, address: str, port: int, user: str) -> Hop:
        target = self.target
        if (address.lower(), port) == (target.address.lower(), target.port) or not self.indirect:
            return target
        trusted = address.lower() if port == 22 else f"[{address.lower()}]:{port}"
        return Hop(address, port, user, (), False, False, target.known_hosts, trusted)

    def find(self, pattern: str) -> re.Match[str] | None:
        """The first line that has the pattern."""
        return next((found for line in self.lines if (found := re.search(pattern, line))), None)

    def own(self) -> list[str]:
        """The lines that are no messages about the progress of ssh."""
        return [line for line in self.lines if line and not line.startswith(_PROGRESS)]

    @property
    def said(self) -> str:
        """The first of them."""
        return next(iter(self.own()), "it says nothing")

    @property
    def shown(self) -> str:
        """The type and the fingerprint of the host key."""
        found = [match[1] for line in self.last if (match := _HOST_KEY.match(line))]
        return found[-1] if found else "a key"

    @property
    def tried(self) -> list[str]:
        """The keys, as messages name them."""
        offered = [match for line in self.last if (match := _OFFERED.match(line))]
        return list(dict.fromkeys(f"{match[1]} ({match[2].rpartition(' ')[2]})" for match in offered))

    @property
    def methods(self) -> str:
        """The methods of authentication that the host offered last."""
        found = [match[1] for line in self.last if (match := _CONTINUE.match(line))]
        return found[-1].replace(",", ", ") if found else ""


def refusal(
    host: str, settings: Settings, said: Sequence[str], logged: Sequence[str], printed: str = "", *,
    shared: bool = False, late: float = 0.0,
) -> HostUnreachable:  # fmt: skip
    """Return the error of a host on which ssh started no command. Raises TurnedAway if it may be tried again.

    said: what came on stderr, also from the ssh that connects to a jump host. logged: by ssh itself. printed: the
    account's output, in place of the command's. shared: whether the connection was open. late: seconds after which it
    was ended, as nothing had come; 0: it ended by itself.
    """
    log = _Log([*said, *logged], settings)
    if shared or any(line.startswith("Authenticated to ") for line in logged):
        if found := log.find(r"session request failed: (.*)|channel \d+: open failed: (.*)"):
            return remedies.no_session(host, found[1] or found[2])
        if log.find(r"closed by remote host|Connection reset|Broken pipe|server not responding"):
            return remedies.broken(host)
        if late:
            return remedies.dead_master(host, settings.hop, late) if shared else remedies.no_start(host, late)
        return remedies.no_command(host, printed + "\n".join(_Log(said, settings).own()))
    if late:
        error = remedies.slow_authentication(log.hop, late) if log.authenticating else remedies.silent(log.hop)
    else:
        error = next(filter(None, (step(log) for step in _STEPS)), None) or _unknown(log)
    return remedies.at(host, error, jump=log.hop is not settings.hop)


def accepted_keys(host: str, settings: Settings, lines: Iterable[str]) -> list[str]:
    """Return a message for each host key that ssh has added to known_hosts. Raises HostUnreachable if it could not."""
    found, before = [], list[str]()
    for line in lines:
        before.append(line)
        if match := _NOT_ADDED.match(line):
            raise remedies.at(host, remedies.not_added(_Log(before, settings).hop, match[1], "ssh cannot write it"))
        if _ADDED.search(line):
            log = _Log(before, settings)
            found.append(f"accepted the new host key of {log.hop}: {log.shown}; it is in {log.hop.known_hosts[0]} now")
    return found


def _unknown(log: _Log) -> HostUnreachable:
    return HostUnreachable(f"ssh does not connect to {log.hop}: {log.said}", "try it with ssh -v")


def _unreachable(log: _Log) -> HostUnreachable | None:
    if found := log.find(r"Could not resolve hostname (\S+): (.*)"):
        return remedies.no_such_name(found[1], found[2])
    if found := log.find(r"^ssh: connect to host (\S+) port (\d+): (.*)"):
        log.hop = log._of(found[1], int(found[2]), log.target.user)
        why = found[3].lower()
        if "timed out" in why:
            return remedies.silent(log.hop)
        if "refused" in why:
            return remedies.refused(log.hop)
        if "no route" in why or "network is unreachable" in why:
            return remedies.no_route(log.hop)
        return remedies.unreachable(log.hop, found[3])
    if found := log.find(r"open failed: (administratively prohibited|connect failed|.*)"):
        log.hop = log.target
        return remedies.forwarding_failed(log.hop, forbidden="prohibited" in found[1])
    return None


def _greeting(log: _Log) -> HostUnreachable | None:
    if log.find(r"during banner exchange|Connection to \S+ port \d+ timed out"):
        return remedies.no_banner(log.hop)
    if log.find(rf"banner line \d+: ({'|'.join(remedies.AWAY)})"):
        raise TurnedAway(remedies.closed_at_once(log.hop))
    if log.find(r"banner line 0:|banner line contains invalid|[Bb]ad remote protocol"):
        return remedies.not_ssh(log.hop)
    if found := log.find(r"Unable to negotiate with .*?: (.*)"):
        return remedies.no_algorithm(log.hop, found[1])
    if log.authenticating:
        return None
    if log.find(r"kex_exchange_identification|ssh_exchange_identification"):
        if not log.indirect:
            raise TurnedAway(remedies.closed_at_once(log.hop))
        what = f"{log.hop} cannot be reached through the ProxyCommand or the jump host of your ssh_config"
        error = HostUnreachable(f"{what}: {log.said}", "try it with ssh -v")
        if log.own():
            return error
        raise TurnedAway(error)
    return None


def _host_key(log: _Log) -> HostUnreachable | None:
    if found := log.find(r"Certificate invalid: (.*)|^(Certificate .*)"):
        return remedies.wrong_certificate(log.hop, "", f"is not valid: {found[1] or found[2]}")
    if log.find(r"REVOKED HOST KEY DETECTED|marked as revoked|is revoked|revoked by file"):
        found = log.find(r"(?:Offending|Host key|marked as revoked).*?(/\S+)")
        return remedies.revoked_host_key(log.hop, log.shown, found[1] if found else "your known_hosts")
    if log.find("IDENTIFICATION HAS CHANGED"):
        found = log.find(r"Offending (\S+) key in (\S+:\d+)")
        kind, place = (found[1], found[2]) if found else ("another key", f"{log.hop.known_hosts[0]}:0")
        return remedies.changed_host_key(log.hop, log.shown, place, key_at(place) or f"another {kind} key")
    if log.find(r"host key is known for|Host key verification failed"):
        return remedies.unknown_host_key(log.hop, log.shown)
    return None


def _login(log: _Log) -> HostUnreachable | None:
    if not log.authenticating:
        return None
    keys = sum(_OFFERED.match(line) is not None for line in log.last)
    if log.find("Too many authentication failures"):
        all_keys = sum(_ATTEMPTED.match(line) is not None for line in log.last)
        return remedies.too_many_keys(log.hop, log.tried, f"{keys} of {max(keys, all_keys)} keys")
    if log.find("Permission denied|No more authentication methods|No supported authentication methods"):
        if log.find(_PARTIAL):
            return remedies.second_factor(log.hop, log.tried, log.methods)
        if log.methods and "publickey" not in log.methods:
            return remedies.takes_no_keys(log.hop, log.tried, log.methods)
        return remedies.not_let_in(log.hop, log.tried, list(_left_out(log)), _of_locked(log))
    if any("SSH2_MSG_SERVICE_ACCEPT received" in line for line in log.last):
        return remedies.not_let_in(log.hop, log.tried, [f"it broke off: {log.said}"], "see the log of its sshd")
    return remedies.no_key_exchange(log.hop, "")


def _left_out(log: _Log) -> Iterable[str]:
    """Yield why keys did not help, as clauses."""
    accepted = [match[1] for line in log.last if (match := _ACCEPTED.match(line))]
    for path in accepted:
        yield f"it accepts {path}, which cannot sign: no ssh-agent knows its passphrase, or its device refuses"
    for line in log.lines:
        if match := re.match(r"(?:no such identity: |Load key )\"?([^\":]+)\"?: (.*)", line):
            absent = match[2].startswith("No such file") and match[1] not in log.hop.keys
            why = f"the key {match[1]} cannot be used: {match[2]}"
            yield f"~/.ssh/config names {match[1]}, which does not exist" if absent else why
    if log.hop.alone and not log.hop.named and not log.tried:
        yield "any keys of the ssh-agent left out, as ~/.ssh/config says IdentitiesOnly"


def _of_locked(log: _Log) -> str:
    path = next((match[1] for line in log.last if (match := _ACCEPTED.match(line))), "")
    return f"unlock it first: ssh-add {path}; or log in yourself: {remedies.opening_a_master(log.hop)}" if path else ""


_STEPS: tuple[Callable[[_Log], HostUnreachable | None], ...] = (_unreachable, _greeting, _host_key, _login)
