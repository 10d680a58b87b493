"""How a host of the inventory is reached: one class per kind of connector (see hosts/).

Their class attributes `shares_files` and `is_here` are Host's, geomx itself dials `address`, and str() is for messages.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

__all__ = ["Local", "Requested", "Slurm", "Ssh", "SshClient"]

SshClient = Literal["auto", "paramiko", "openssh"]


class Local(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="local"):
    """The machine that runs geomx."""

    shares_files: ClassVar[bool] = True
    is_here: ClassVar[bool] = True
    address: ClassVar[str] = "127.0.0.1"

    def __str__(self) -> str:
        return "this machine"


class Ssh(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ssh"):
    """A machine behind SSH. Empty fields default to the user's ~/.ssh/config.

    address: name, IP address or alias of ~/.ssh/config.
    port: 0: that of ~/.ssh/config, or 22.
    key: path of a private key; empty: the agent's and the usual ones.
    jump: user@host:port of the machines between, separated by commas.
    fingerprint: SHA256:... of the host key; empty: known_hosts.
    client: the program that connects; auto: paramiko, or OpenSSH's ssh for what paramiko cannot do.
    """

    address: Annotated[str, Meta(min_length=1)]
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    user: str = ""
    key: str = ""
    jump: str = ""
    fingerprint: str = ""
    client: SshClient = "auto"
    shares_files: ClassVar[bool] = False
    is_here: ClassVar[bool] = False

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address and self.port else self.address
        target = f"{self.user}@{address}" if self.user else address
        port = f":{self.port}" if self.port else ""
        return f"ssh {target}{port}" + (f" through {self.jump}" if self.jump else "")


class Slurm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="slurm"):
    """A node of a Slurm job, on which srun starts commands.

    address: of the node, as the others of its cluster dial it.
    login: where srun runs. If that is this machine, it shares its files with the nodes.
    job: Slurm's id.
    node: Slurm's name.
    container: the image in which Apptainer runs commands; empty: none.
    step: the name of the long step there (agent/job_step.py), which is that of one job of geomx.
    """

    address: str
    login: Local | Ssh
    job: int
    node: str
    container: str = ""
    step: str = ""
    is_here: ClassVar[bool] = False

    @property
    def shares_files(self) -> bool:
        """See Host."""
        return self.login.shares_files

    def __str__(self) -> str:
        return f"srun on node {self.node}, from {self.login}"


class Requested(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="requested"):
    """A machine that an allocator gives at launch.

    address: a name that stands for its address until then; in an allocation that is there already, its node's.
    shares_files: as the machine that it will be.
    """

    address: str
    shares_files: bool = False
    is_here: ClassVar[bool] = False

    def __str__(self) -> str:
        return "a machine given at launch"
