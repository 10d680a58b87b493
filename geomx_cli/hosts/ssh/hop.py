"""One machine on the route to a host behind SSH."""

from dataclasses import dataclass

__all__ = ["Hop"]


@dataclass(frozen=True)
class Hop:
    """One machine on the route to a host; the last one is the host itself.

    `keys`: private key files; `named`: they are configured explicitly; `alone`: the agent's other keys are not tried,
    as they are or ssh_config says IdentitiesOnly. `trusted_as` is its name in `known_hosts`, the host key files;
    accepted keys are appended to the first. agent: the socket of the ssh-agent to use; "" for that of the environment,
    "none" for none. certificates: files for any of the keys. absent: files that ssh_config names and that do not exist.
    """

    address: str
    port: int
    user: str
    keys: tuple[str, ...]
    named: bool
    alone: bool
    known_hosts: tuple[str, ...]
    trusted_as: str
    fingerprint: str = ""
    agent: str = ""
    certificates: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.user}@{self.address} port {self.port}"
