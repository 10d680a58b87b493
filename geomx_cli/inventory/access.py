"""How a host of the inventory is reached: one class per kind of connector (see hosts/)."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Local", "Ssh"]


class _Access(BaseModel):
    """`shares_files`: see Host.shares_files; `address`: dialled by geomx itself; str() is for messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shares_files: ClassVar[bool] = False


class Local(_Access):
    """The machine that runs geomx."""

    kind: Literal["local"] = "local"
    shares_files: ClassVar[bool] = True
    address: ClassVar[str] = "127.0.0.1"

    def __str__(self) -> str:
        return "this machine"


class Ssh(_Access):
    """A machine behind SSH. Empty fields default to the user's ~/.ssh/config."""

    kind: Literal["ssh"] = "ssh"
    address: str = Field(min_length=1, description="name, IP address or alias of ~/.ssh/config")
    port: int = Field(default=0, ge=0, le=65535, description="0: that of ~/.ssh/config, or 22")
    user: str = ""
    key: str = Field(default="", description="path of a private key; empty: the agent's and the usual ones")
    jump: str = Field(default="", description="user@host:port of the machines between, separated by commas")
    fingerprint: str = Field(default="", description="SHA256:... of the host key; empty: known_hosts")

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address and self.port else self.address
        target = f"{self.user}@{address}" if self.user else address
        port = f":{self.port}" if self.port else ""
        return f"ssh {target}{port}" + (f" through {self.jump}" if self.jump else "")
