"""One machine on the way to a host behind SSH."""

from dataclasses import dataclass

__all__ = ["Hop"]


@dataclass(frozen=True)
class Hop:
    """One machine on the way to a host, the last one being the host itself.

    `keys`: private key files; `named`: whether somebody named them, so that no others are tried. `trusted_as` is
    its name in `known_hosts`, the files with host keys, of which accepted ones go to the first.
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
