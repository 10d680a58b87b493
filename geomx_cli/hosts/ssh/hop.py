"""One machine on the route to a host behind SSH."""

from dataclasses import dataclass

__all__ = ["Hop"]


@dataclass(frozen=True)
class Hop:
    """One machine on the route to a host; the last one is the host itself.

    `keys`: private key files; `named`: they are configured explicitly, so no others are tried. `trusted_as` is its
    name in `known_hosts`, the host key files; accepted keys are appended to the first.
    """

    address: str
    port: int
    user: str
    keys: tuple[str, ...]
    named: bool
    known_hosts: tuple[str, ...]
    trusted_as: str
    fingerprint: str = ""

    def __str__(self) -> str:
        return f"{self.user}@{self.address} port {self.port}"
