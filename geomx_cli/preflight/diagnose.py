"""Diagnosis of failed dials: description and remedy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from geomx_cli.contract.addresses import is_loopback
from geomx_cli.core.errors import CheckFailed, HostUnreachable
from geomx_cli.preflight.connect import Dialled
from geomx_cli.preflight.probe_pool import Facts

__all__ = ["Check", "Level", "REACHABLE", "addresses_of", "exit_code", "link_checks", "refuse", "together"]

# A check result: its subject, level, problem and remedy.

Level = Literal["ok", "warning", "problem"]
REACHABLE = "reachable"
"""Name of the check that a host responds."""


@dataclass(frozen=True)
class Check:
    """One finding.

    subject: a host or several ("alpha", "alpha, beta"), a link in the direction of dialling ("alpha -> hub"), or the
        inventory.
    what: the problem, without a full stop; "" at level "ok".
    fix: the remedy, without a full stop; "" at level "ok".
    """

    subject: str
    name: str
    level: Level = "ok"
    what: str = ""
    fix: str = ""

    @property
    def text(self) -> str:
        """The subject and its problem."""
        return f"{self.subject}: {self.what}"


def together(checks: Sequence[Check]) -> list[Check]:
    """Return the checks, problems first. Identical findings for several hosts, e.g. on one machine, are merged.
    """
    fine = [check for check in checks if check.level == "ok"]
    found: dict[Check, list[str]] = {}
    for check in checks:
        if check.level != "ok":
            found.setdefault(replace(check, subject=""), []).append(check.subject)
    return [*(replace(check, subject=", ".join(dict.fromkeys(names))) for check, names in found.items()), *fine]


def exit_code(checks: Iterable[Check]) -> int:
    """Return 4 if a host is unreachable, 5 for any other problem, otherwise 0."""
    problems = [check for check in checks if check.level == "problem"]
    if any(check.name == REACHABLE for check in problems):
        return HostUnreachable.exit_code
    return CheckFailed.exit_code if problems else 0


def refuse(checks: Iterable[Check]) -> None:
    """Raise HostUnreachable or CheckFailed with the text of all problems, if any."""
    problems = [check for check in checks if check.level == "problem"]
    if not problems:
        return
    kind = HostUnreachable if exit_code(problems) == HostUnreachable.exit_code else CheckFailed
    if len(problems) == 1:
        raise kind(problems[0].text, problems[0].fix)
    words = [f"  {check.text}\n    {check.fix}".rstrip() for check in problems]
    raise kind("\n".join([f"{len(problems)} problems:", *words]))


_ANSWERS = ("ok", "refused", "silent", "other-host", "other")
_NAMED = 8


def link_checks(results: Sequence[Dialled], facts: Mapping[str, Facts]) -> Iterator[Check]:
    """Yield one check per successful dial, and one per group of identical failures towards a host.

    The diagnosis of a failure depends on the results of the other dials.
    """
    for result in results:
        if result.kind == "ok":
            yield Check(result.dial.subject, "link")
    streams = [result for result in results if result.dial.protocol == "tcp"]
    for trouble in _troubles(streams):
        what, fix = _Words(trouble, streams, facts).both()
        yield Check(f"{_listed(trouble.diallers)} -> {trouble.listener}", "link", "problem", what, fix)
    for trouble in _troubles([result for result in results if result.dial.protocol == "udp"]):
        yield _lost_datagrams(trouble)


def addresses_of(host: str, facts: Mapping[str, Facts]) -> str:
    """Describe the addresses of a host, as a phrase to follow a comma or to put in parentheses."""
    if host not in facts:
        return f"see `ip address` on {host}"
    named = [
        f"{address} on {name}"
        for name, own in facts[host].addresses.items()
        for address in own
        if not is_loopback(address)
    ]
    return f"it has {_listed(named) or 'only loopback'}"


@dataclass
class _Trouble:
    """Identical failures of dials from `diallers` to `ports` of one address; `first` is one of them."""

    first: Dialled
    diallers: list[str]
    ports: list[int]

    @property
    def listener(self) -> str:
        return self.first.dial.listener


def _troubles(results: Sequence[Dialled]) -> list[_Trouble]:
    by_dialler: dict[tuple[str, ...], _Trouble] = {}
    for result in results:
        if result.kind != "ok":
            dial = result.dial
            key = (dial.dialler, dial.listener, dial.address, result.ip, result.kind, result.detail)
            by_dialler.setdefault(key, _Trouble(result, [dial.dialler], [])).ports.append(dial.port)
    alike: dict[tuple[object, ...], _Trouble] = {}
    for (_, *how), trouble in by_dialler.items():
        same = alike.setdefault((*how, *trouble.ports), trouble)
        if same is not trouble:
            same.diallers += trouble.diallers
    return list(alike.values())


def _lost_datagrams(trouble: _Trouble) -> Check:
    """Return a warning that a job without datagrams sends everything by TCP."""
    dial, diallers = trouble.first.dial, _listed(trouble.diallers)
    sender, receiver = dial.processes
    port = f"UDP port{'s' * (len(trouble.ports) > 1)} {_listed(str(port) for port in trouble.ports)}"
    detail = f" ({trouble.first.detail})" if trouble.first.detail else ""
    what = f"no datagram reaches {dial.address} {port}{detail} ({sender} sends to {receiver}): a firewall drops UDP"
    fix = f"let {diallers} reach {port} of {trouble.listener}; until then --dgt 1 sends all blocks by TCP"
    return Check(f"{diallers} -> {trouble.listener}", "datagrams", "warning", what, fix)


class _Words:
    """Builds the text for one group of failures."""

    def __init__(self, trouble: _Trouble, results: Sequence[Dialled], facts: Mapping[str, Facts]) -> None:
        first = trouble.first
        self._first, self._dial, self._facts = first, first.dial, facts
        self._from, self._to = _listed(trouble.diallers), trouble.listener
        self._ports = f"port{'s' * (len(trouble.ports) > 1)} {_listed(str(port) for port in trouble.ports)}"
        same_way = [
            other
            for other in results
            if other.dial.dialler in trouble.diallers and other.dial.address == first.dial.address
        ]
        self._answered = any(other.kind == "ok" for other in same_way)
        self._reached = any(other.kind in _ANSWERS for other in same_way)

    def both(self) -> tuple[str, str]:
        """Return the problem and the remedy."""
        why, fix = self._why()
        return f"{self._who()}: {why}", fix

    def _who(self) -> str:
        dial, ip = self._dial, self._first.ip
        resolved = f" ({ip})" if ip not in ("", dial.address) else ""
        dialler, listener = dial.processes
        return f"{dial.address}{resolved} {self._ports} cannot be reached ({dialler} dials {listener})"

    def _why(self) -> tuple[str, str]:
        detail = self._first.detail
        let = f"let {self._from} reach TCP {self._ports} of {self._to}"
        address = f"correct the address of {self._to} in the inventory ({addresses_of(self._to, self._facts)})"
        either = let if self._answered else f"{let}, or {address}"
        match self._first.kind:
            case "timeout":
                return f"no answer; {self._dropped()}", let if self._reached else either
            case "refused" if is_loopback(self._first.ip or self._dial.address):
                return "with that address it dials itself", address
            case "refused" if self._elsewhere():
                why = f"it listens at {self._dial.bound} only, and this is another of its addresses"
                return why, f'set listen = "0.0.0.0" for {self._to} in the inventory, or leave listen out'
            case "refused":
                return f"the connection is refused though {self._to} listens; {self._rejected()}", either
            case "route":
                why = f"no route ({detail}): a wrong address, a missing route, or a firewall that rejects it"
                return why, f"see `ip route get {self._first.ip}` on {self._dial.dialler}, or {address}"
            case "forbidden":
                return f"a rule on {self._from} itself forbids it ({detail})", let
            case "name":
                return f"the name is not known there ({detail})", address
            case "silent":
                why = "connected, but no data arrive; something in between blocks them"
                return why, f"check for a proxy or firewall between them, or {address}"
            case "other-host":
                return "another host of this inventory, or of another job, answers there", address
            case "other":
                return "another program answers there", address
        return detail or self._first.kind, either

    def _dropped(self) -> str:
        """Return the most likely reason for dropped packets."""
        if self._reached:
            return f"other ports there answer, so a firewall drops what goes to {self._ports}"
        if self._foreign():
            return f"a wrong address (it is none of those that {self._to} itself has), or a firewall that drops it"
        return "a firewall drops it, or there is no return route"

    def _rejected(self) -> str:
        if self._answered or not self._foreign():
            return "a firewall rejects it"
        return f"the address is another machine's (it is none of those that {self._to} itself has)"

    def _elsewhere(self) -> bool:
        """Whether the listener has this address but is bound to another."""
        return self._dial.bound not in ("0.0.0.0", "::", self._first.ip) and not self._foreign()

    def _foreign(self) -> bool:
        """Whether the listener's addresses are known and do not include this one."""
        known = self._facts.get(self._to)
        return known is not None and not any(self._first.ip in own for own in known.addresses.values())


def _listed(words: Iterable[str]) -> str:
    """Join words with commas, with a count of those omitted."""
    found = list(words)
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
