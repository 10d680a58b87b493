"""Chooses the client that connects to a host: paramiko, or OpenSSH's ssh for what paramiko cannot do."""

import shutil

from geomx_cli.hosts.ssh.by_openssh import OpensshConnection
from geomx_cli.hosts.ssh.by_paramiko import ParamikoConnection
from geomx_cli.hosts.ssh.config import Unsupported, UnsupportedWay, hop, hops
from geomx_cli.hosts.ssh.connection import Connection
from geomx_cli.hosts.ssh.openssh_folder import Folder
from geomx_cli.hosts.ssh.openssh_settings import is_open, resolved
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Ssh

__all__ = ["address", "connect"]


def connect(host: str, ssh: Ssh, options: SshOptions) -> Connection:
    """Connect to a host. Raises HostUnreachable with its name and the cause, InvalidSettings for an ssh_config that
    cannot be used.
    """
    reason = _reason(ssh, options)
    if not reason:
        return ParamikoConnection(host, hops(ssh, options), options)
    if ssh.client == "auto":
        options.notify_once(reason, f"geomx connects by the program ssh to host {host}: {reason}")
    return OpensshConnection(host, ssh, options)


def address(ssh: Ssh, options: SshOptions) -> str:
    """Return the address that is dialled. Raises InvalidSettings for an ssh_config that cannot be used."""
    try:
        if ssh.client != "openssh":
            return hop(ssh, options).address
    except Unsupported:
        if not _may_fall_back(ssh):
            raise
    folder = Folder()
    try:
        return resolved(ssh, options, folder.path).hop.address
    finally:
        folder.remove()


def _reason(ssh: Ssh, options: SshOptions) -> str:
    """Return why ssh connects to this host, as a clause; "" if paramiko does."""
    if ssh.client == "openssh":
        return "the inventory says so"
    try:
        way = hops(ssh, options)
    except (Unsupported, UnsupportedWay) as error:
        if not _may_fall_back(ssh):
            raise
        return error.message
    if not _may_fall_back(ssh):
        return ""
    for each in way:
        if each.beyond:
            return f"{options.config} has {', '.join(each.beyond)}"
        if is_open(each.master, options):
            return f"a connection of yours is open at {each.master}"
    return ""


def _may_fall_back(ssh: Ssh) -> bool:
    return ssh.client == "auto" and shutil.which("ssh") is not None
