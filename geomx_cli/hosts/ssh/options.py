"""Settings common to all hosts behind SSH."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geomx_cli.hosts.ssh.credentials import Credentials
from geomx_cli.inventory import Ssh

__all__ = ["SshOptions"]


@dataclass(frozen=True)
class SshOptions:
    """Settings common to all hosts behind SSH; share one object, so that each passphrase is requested once.

    `config`: the user's ssh_config, which may be missing. `notify` receives messages for the user; it is called from
    any thread.

    lookups: the ssh_config's entries for each name. The file is read once, and its Match exec runs once.
    resolved: what `ssh -G` prints.
    said: subjects of messages that are not repeated.
    """

    accept_new_host_keys: bool = False
    config: str = "~/.ssh/config"
    known_hosts: str = "~/.ssh/known_hosts"
    notify: Callable[[str], None] = lambda text: None
    credentials: Credentials = field(default_factory=Credentials)
    lookups: dict[str, dict[str, Any]] = field(default_factory=dict)
    resolved: dict[Ssh, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def notify_once(self, subject: str, text: str) -> None:
        """Notify the user, unless of this subject already."""
        with self.lock:
            if subject in self.said:
                return
            self.said.add(subject)
        self.notify(text)
