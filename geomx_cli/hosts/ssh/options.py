"""What holds for all hosts behind SSH."""

from collections.abc import Callable
from dataclasses import dataclass, field

from geomx_cli.hosts.ssh.credentials import Credentials

__all__ = ["SshOptions"]


@dataclass(frozen=True)
class SshOptions:
    """What holds for all hosts behind SSH; give the same object to all, so that a passphrase is asked for once.

    `config`: the user's own ssh_config, which need not exist. `notify` gets what a user should read; any
    thread calls it.
    """

    accept_new_host_keys: bool = False
    config: str = "~/.ssh/config"
    known_hosts: str = "~/.ssh/known_hosts"
    notify: Callable[[str], None] = lambda text: None
    credentials: Credentials = field(default_factory=Credentials)
